"""Ranks that share rows train as one process does: metrics, gradients and weights, also after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.oracle_model import packed_directory, tiny_config
from support.rank_processes import Case, assert_same_steps, four_trees, train_over
from support.refusal import refusal
from treepack.train.ranks import Ranks


@pytest.mark.slow
def test_ranks_that_share_rows_train_as_one_process_does(tmp_path: Path) -> None:
    packed = packed_directory(tmp_path / "packed", four_trees(), capacity=50)
    held_out = packed_directory(tmp_path / "held-out", four_trees(30), capacity=40)
    plain = tiny_config(tmp_path / "plain.json", tie_word_embeddings=True)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    mixture = tiny_config(tmp_path / "mixture.json", "qwen3", **experts, model_type="qwen3_moe")
    odd: dict[str, Any] = {"num_attention_heads": 3, "num_key_value_heads": 3}  # heads that two ranks cannot divide
    steps = {"steps": 2, "rows_per_step": 3, "sequence_ranks": 2}
    cases = [
        Case("whole", packed, plain, {**steps, "eval_every": 1, "checkpoint_layers": "all"}, held_out=held_out),
        Case("joined", packed, plain, {**steps, "pass_tokens": 80, "compile": True}, "grpo"),
        Case("pieces", packed, plain, {**steps, "carry": 7}, "gspo"),
        Case("taught", packed, plain, {**steps, "carry": 7}, "distill", teacher=tiny_config(tmp_path / "teacher.json")),
        Case("taught whole", packed, plain, steps, "opd", teacher=tiny_config(tmp_path / "odd.json", **odd)),
        Case("balanced", packed, mixture, {**steps, "router_aux": 0.1}),
    ]
    stopped = Case("stopped", packed, plain, steps, out=tmp_path / "stopped", until=1)
    results = train_over(2, tmp_path, [*cases, stopped])
    # Compiled layers are compared with the same layers as they are.
    one = {"sequence_ranks": 1, "compile": False}
    alone = [replace(case, changes={**case.changes, **one}) for case in [*cases, stopped]]
    others = [
        *alone[:-1],
        replace(alone[-1], name="resumed", until=None),
        Case("all", packed, plain, {**steps, "sequence_ranks": 1}),
    ]
    expected = train_over(0, tmp_path, others)
    for case in cases:
        assert_same_steps(results[case.name], expected[case.name])
    resumed = {**expected["resumed"], "records": results["stopped"]["records"] + expected["resumed"]["records"]}
    assert_same_steps(resumed, expected["all"])


def test_ranks_that_cannot_share_rows_are_refused() -> None:
    assert "this process is alone; start the ranks with torchrun" in refusal(Ranks().sharing, 2)
    assert "sequence_ranks is 4 and the run has 6 ranks; start a multiple of it" in refusal(
        Ranks(0, 6, grouped=True).sharing, 4
    )


def test_ranks_of_one_row_have_one_share_of_the_rows() -> None:
    ranks = [Ranks(rank, 4, grouped=True, machines=2).sharing(2) for rank in range(4)]
    assert [each.row_share for each in ranks] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [each.counts_rows for each in ranks] == [True, False, True, False]
    assert ranks[0].machines == 2
    assert ranks[0].sharing(4).machines == 1  # both machines read all rows
