"""Ranks that share the tokens of a row: the losses and gradients of one process, with every kind of layer."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.hybrid_models import options_of
from support.refusal import refusal
from support.sequence_ranks import SHORT, Check, objective_checks, run_over_ranks, with_routes, write_config
from treepack.model.adapters.lora_options import LoraOptions
from treepack.model.head.logit_map import OutputLayer
from treepack.model.head.token_loss import tree_logprobs, weighted_nll
from treepack.model.term_objective import score
from treepack.objectives.row_numbers import LossPart, ScoreRequest
from treepack.sequence.exchange import split_evenly
from treepack.sequence.share import SequenceGroup, TokenShare, check_heads

# Windows, sinks and experts; the gated delta rule; Mamba-2; a convolution alone. KDA, which is slow, has a short row.
KINDS = "gpt_oss qwen3_5_text granitemoehybrid lfm2".split()
OBJECTIVES: list[dict[str, Any]] = [
    {"name": "ppo", "dual_clip": 1.3, "entropy": 0.2, "value_coef": 0.5},
    {"name": "gspo", "clip_low": 0.03, "clip_high": 0.04, "entropy": 0.2},
    {"name": "dpo", "beta": 0.7},
]


@pytest.mark.slow
def test_four_ranks_have_the_gradients_of_one_process(tmp_path: Path) -> None:
    checks = [Check(kind, write_config(tmp_path, kind, **options_of(kind))) for kind in KINDS]
    pieces = [Check(f"{each.name} in pieces", each.config, limit=5) for each in checks]
    delta = Check("KDA", write_config(tmp_path, "kimi_linear", **options_of("kimi_linear")), ((SHORT, LossPart()),))
    adapted = Check("adapted", write_config(tmp_path, "qwen3"), options={"lora": LoraOptions(rank=2)})
    groups = write_config(tmp_path, "deepseek_v3", first_k_dense_replace=0, n_group=2, topk_group=1)
    replayed = Check("recorded experts", groups, with_routes(checks[0].batches))
    replayed_pieces = replace(replayed, name="recorded experts in pieces", limit=5)
    terms = objective_checks(tmp_path, write_config(tmp_path, "qwen3"), write_config(tmp_path, "qwen3_moe"), OBJECTIVES)
    found = run_over_ranks(tmp_path, [*checks, *pieces, delta, adapted, replayed, replayed_pieces, *terms])
    assert len(found) == 2 * (2 * len(KINDS) + 4 + 2 * len(OBJECTIVES) + 2) + 1
    assert {key: each for key, each in found.items() if not each < 1e-9} == {}


def shares_of(length: int, size: int, num_rows: int = 1) -> list[TokenShare]:
    """Return the shares of all ranks; sums over the ranks have the part of one."""
    edges = split_evenly(length, size)
    return [TokenShare(SequenceGroup(None, rank, size), edges, num_rows) for rank in range(size)]


def test_tokens_are_divided_evenly_and_a_rank_without_a_token_gets_one_of_no_weight() -> None:
    assert split_evenly(10, 4) == [0, 2, 5, 7, 10]
    column = torch.arange(10)
    assert torch.equal(torch.cat([share.cut(column) for share in shares_of(10, 4)]), column)
    rows = torch.arange(20).view(2, 10)
    parts = [share.cut(rows, 1) for share in shares_of(10, 4, 2)]
    assert torch.equal(torch.cat(parts, 1), rows)
    assert torch.equal(shares_of(10, 4, 2)[1].cut_flat(rows.flatten()), parts[1].flatten())
    few = shares_of(2, 4)
    assert [share.cut(torch.tensor([5, 6])).tolist() for share in few] == [[5], [5], [5], [6]]
    assert [share.weights(torch.tensor([5, 6])).tolist() for share in few] == [[0], [5], [0], [6]]


def test_each_target_belongs_to_the_rank_of_its_parent() -> None:
    # Two rows of 5 tokens on 2 ranks: tokens 0 1 | 2 3 4 of each.
    parent = torch.tensor([-1, 0, 1, 1, 3, -1, 5, 5, 7, 8])
    tokens, ids = torch.tensor([9, 1, 2, 4, 6, 8]), torch.arange(10)
    first, second = shares_of(5, 2, 2)
    places, (own, _, local) = first.own_targets((tokens, ids, parent))
    assert (places.tolist(), own.tolist()) == ([1, 2, 4], [1, 2, 6])
    assert local[own].tolist() == [0, 1, 2]  # states 0 1 of row 0, then 0 1 of row 1
    places, (own, _, local) = second.own_targets((tokens, ids, parent))
    assert (places.tolist(), own.tolist()) == ([0, 3, 5], [9, 4, 8])
    assert local[own].tolist() == [3 + 1, 1, 3 + 0]


@pytest.mark.usefixtures("lone_group")
def test_losses_of_all_ranks_add_up() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    weight = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    parent = torch.tensor([-1, 0, 1, 2, 1, 4, 0])
    targets = torch.randint(9, (7,), generator=generator), parent, torch.tensor([0.0, 1, 2, 0, 1, 3, 1])
    tokens = torch.tensor([6, 1, 4, 2])
    expected = weighted_nll(hidden, OutputLayer(weight), targets, chunk=2)
    scores = tree_logprobs(hidden, OutputLayer(weight), (tokens, *targets[:2]), chunk=2)

    losses, parts = [], []
    for share in shares_of(7, 3):
        assert share.total(hidden.sum())._base is None, "FSDP2 warns of views"
        layer, states = OutputLayer(weight, share=share), share.cut(hidden)
        losses.append(float(weighted_nll(states, layer, targets, chunk=2)))
        parts.append(tree_logprobs(states, layer, (tokens, *targets[:2]), chunk=2))
    assert losses[0] > losses[1] == 0  # no token that rank 1 predicts is trained
    assert math.fsum(losses) == pytest.approx(float(expected), rel=1e-12)
    for whole, part in zip(scores, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(sum(part), whole, rtol=1e-12, atol=0)


@pytest.mark.usefixtures("lone_group")
def test_likeliest_words_and_states_of_all_ranks_add_up() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (7, 9))
    targets = torch.tensor([6, 1, 4, 2]), torch.arange(7), torch.tensor([-1, 0, 1, 2, 1, 4, 0])
    reads = ScoreRequest(logprobs=False, entropies=False, top_k=3, states=True)
    options: dict[str, Any] = {"temperature": torch.tensor([0.5, 1, 2, 3]), "kept": None, "chunk": 2}
    loaded: Any = None  # only values read it
    expected = score(loaded, reads, hidden, OutputLayer(weight), targets, **options)
    parts = [
        score(loaded, reads, share.cut(hidden), OutputLayer(weight, share=share), targets, **options)
        for share in shares_of(7, 3)
    ]
    for name in ("top_words", "top_logprobs", "states"):
        whole = getattr(expected, name)
        torch.testing.assert_close(sum(getattr(part, name) for part in parts), whole, rtol=1e-12, atol=0)
    assert expected.states is not None
    assert torch.equal(expected.states, hidden[targets[2][targets[0]]])


def test_heads_that_the_ranks_cannot_share_are_refused_by_the_configuration() -> None:
    config = SimpleNamespace(num_attention_heads=14, mamba_num_heads=None, linear_num_value_heads=[8, 8])
    check_heads(config, 2, "model")
    assert "model: 4 ranks cannot share the 14 heads of a layer; give --sequence-ra" in refusal(
        check_heads, config, 4, "model"
    )
    assert "cannot share the 8 heads" in refusal(
        check_heads, SimpleNamespace(**{**vars(config), "num_attention_heads": 14}), 7, "model"
    )
