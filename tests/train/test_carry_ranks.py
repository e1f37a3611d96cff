"""Several ranks with rows in pieces: gradients of one process, and no rank waits for another one within a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.oracle_model import packed_directory, tiny_config
from support.rank_processes import Case, train_over
from support.strategies import make
from treepack.trajectory import Trajectory

NOT_COMPARED = set(
    "seconds wait_seconds slowest_pass tokens_per_second tokens_flat_per_second graphs eval_seconds".split()
)


def rollouts(first: int = 0) -> list[Trajectory]:
    """Return four trees of different sizes, so that rows of 50 tokens have different numbers of pieces."""
    found = []
    for tree, (prompt, answers) in enumerate([(6, 1), (8, 3), (20, 2), (9, 5)]):
        start = [first + tree, *(10 + i % 5 for i in range(prompt - 1))]
        for answer in range(answers):
            tokens = [*start, 20 + answer, *(21 + (answer + i) % 4 for i in range(3 + 2 * answer))]
            spans = [(prompt, len(tokens), 1.0 + answer % 2)]
            name = f"t{tree}-{answer}"
            found.append(make(name, tokens, spans=spans, group=f"g{tree}", advantage=answer - 1.0, reward=1.0 * answer))
    return found


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return packed_directory(tmp_path / "packed", rollouts(), capacity=50)


def assert_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that metrics and the gradients of the last step are equal except for float32 rounding."""
    assert len(result["records"]) == len(expected["records"]) > 0
    for actual, reference in zip(result["records"], expected["records"], strict=True):
        assert actual.keys() == reference.keys()
        for name in actual.keys() - NOT_COMPARED:
            assert actual[name] == pytest.approx(reference[name], rel=2e-5, abs=1e-6), name
    assert result["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        torch.testing.assert_close(result["gradients"][name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_ranks_with_different_numbers_of_pieces_train_as_one_process_does(packed: Path) -> None:
    folder = packed.parent
    held_out = packed_directory(folder / "held-out", rollouts(30), capacity=40)
    tied = tiny_config(folder / "tied.json", tie_word_embeddings=True)
    untied = tiny_config(folder / "untied.json", tie_word_embeddings=False)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    mixture = tiny_config(folder / "mixture.json", "qwen3", **experts, model_type="qwen3_moe")
    # Pieces of 24 tokens cut some rows and leave the others whole.
    whole = {"steps": 2, "rows_per_step": 3, "eval_every": 1}
    once = {"steps": 1, "rows_per_step": 4}
    cases = [
        Case("tied", packed, tied, {**whole, "carry": 5}, held_out=held_out),
        Case("some", packed, untied, {**whole, "carry": 24}, held_out=held_out),
        Case("lonely", packed, untied, {"steps": 1, "rows_per_step": 1, "carry": 3}),
        Case("recomputed", packed, tied, {**once, "carry": 7, "checkpoint_layers": "all", "compile": True}),
        Case("mixture", packed, mixture, {**once, "carry": 7}),
        Case("offloaded", packed, untied, {**whole, "carry": 7, "offload_optimizer": True}),
        Case("grpo", packed, untied, {**once, "carry": 7}, "grpo"),
        Case("gspo", packed, tied, {**once, "carry": 7}, "gspo"),
    ]
    # Whole rows with whole weights: ranks wait for each other in the last pass only, and checkpoints have one format.
    apart = Case("apart", packed, tied, {**whole, "rows_per_step": 4, "whole_weights": True}, held_out=held_out)
    begun = Case("begun", packed, untied, {**whole, "whole_weights": True}, out=folder / "again", until=1)
    ended = Case("ended", packed, untied, whole, out=folder / "again")
    results = train_over(2, folder, [*cases, apart, begun, ended])
    # 0: this process, without a group; compiled layers are compared with the same layers as they are
    alone = [replace(case, changes={**case.changes, "compile": False}) for case in [*cases, apart]]
    expected = train_over(0, folder, [*alone, Case("ended", packed, untied, whole)])
    assert_same(results["apart"], expected["apart"])
    assert_same(results["ended"], {**expected["ended"], "records": expected["ended"]["records"][1:]})
    rows = train_over(0, folder, [Case("rows", packed, tied, whole, held_out=held_out)])["rows"]
    for case in cases:
        assert_same(results[case.name], expected[case.name])
        assert any(each["tokens_forward"] > each["tokens_backward"] for each in results[case.name]["records"])
    for whole_rows, in_pieces in zip(rows["records"], results["tied"]["records"], strict=True):
        assert in_pieces["loss"] == pytest.approx(whole_rows["loss"], rel=1e-5)
        assert in_pieces["eval_loss"] == pytest.approx(whole_rows["eval_loss"], rel=1e-5)
