"""Several ranks with rows in pieces: gradients of one process, and no rank waits for another one within a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.oracle_model import packed_directory, tiny_config
from support.rank_processes import Case, assert_same_steps, four_trees, train_over


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return packed_directory(tmp_path / "packed", four_trees(), capacity=50)


@pytest.mark.slow
def test_ranks_with_different_numbers_of_pieces_train_as_one_process_does(packed: Path) -> None:
    folder = packed.parent
    held_out = packed_directory(folder / "held-out", four_trees(30), capacity=40)
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
    assert_same_steps(results["apart"], expected["apart"])
    assert_same_steps(results["ended"], {**expected["ended"], "records": expected["ended"]["records"][1:]})
    rows = train_over(0, folder, [Case("rows", packed, tied, whole, held_out=held_out)])["rows"]
    for case in cases:
        assert_same_steps(results[case.name], expected[case.name])
        assert any(each["tokens_forward"] > each["tokens_backward"] for each in results[case.name]["records"])
    for whole_rows, in_pieces in zip(rows["records"], results["tied"]["records"], strict=True):
        assert in_pieces["loss"] == pytest.approx(whole_rows["loss"], rel=1e-5)
        assert in_pieces["eval_loss"] == pytest.approx(whole_rows["eval_loss"], rel=1e-5)
