"""Losses over kept sets: each gradient equals that of a dense renormalised softmax, rollout by rollout, in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.oracle_model import VOCABULARY, gradients, tiny_config, worst_error, write_rows
from support.oracle_objectives import Rollout, own_logprobs, step_loss
from support.packed_gradients import assert_equal
from support.packed_objectives import as_trajectories, opened, packed_model, plain, rollouts
from support.refusal import refusal
from support.strategies import make
from treepack.carry.backward import CarryOptions, backward_row
from treepack.carry.verify import in_pieces
from treepack.data.batch import make_batch
from treepack.errors import TreepackError
from treepack.model.adapters.lora_options import LoraOptions
from treepack.model.forward import WholeRows, prepare_batch
from treepack.model.verify.gradients import verify_gradients
from treepack.objectives.denominators import step_factors, trajectory_table
from treepack.objectives.objective import choose_objective
from treepack.objectives.row_numbers import LossPart
from treepack.online import plan_batch, tree_logprobs_like
from treepack.pack.files import read_rows
from treepack.pack.plan.planning import plan_rows
from treepack.pack.rows import pack_rows
from treepack.ragged import RaggedArray
from treepack.train.logprobs import term_scores
from treepack.train.options import TrainOptions
from treepack.train.scoring_options import ScoreOptions
from treepack.train.setup.opening import open_verification
from treepack.trie.builders.in_memory import build_trie

CASES: list[dict[str, Any]] = [
    {"name": "grpo", "kl": 0.3, "entropy": 0.2, "importance_cap": 1.1},
    {"name": "gspo", "clip_low": 0.03, "clip_high": 0.04, "kl": 0.1, "entropy": 0.2},
    {"name": "reinforce"},
]


def with_sets(samples: tuple[Rollout, ...], seed: int, *, tempered: bool) -> list[Rollout]:
    """Give each token a random set, of 1 to 6 words or none; equal prefixes often have the same sets, or other ones."""
    result = []
    for i, sample in enumerate(samples):
        rng = np.random.default_rng([seed, i % 3])
        sets = []
        for token in sample.tokens:
            others = rng.integers(0, VOCABULARY, int(rng.integers(0, 6))).tolist()
            sets.append(sorted({token, *others}) if rng.random() < 0.8 else [])
        heat: Any = rng.choice([0.5, 0.7, 1.0], len(sample.tokens)).astype(np.float32).tolist() if tempered else None
        result.append(replace(sample, kept=sets, temperatures=heat))
    return result


@settings(max_examples=4)
@given(
    case=st.sampled_from(CASES),
    seed=st.integers(0, 99),
    limit=st.sampled_from([None, 1, 3, 7, 1000]),
    tempered=st.booleans(),
)
def test_gradients_are_those_of_a_dense_renormalised_softmax(
    tmp_path_factory: pytest.TempPathFactory, case: dict[str, Any], seed: int, limit: int | None, tempered: bool
) -> None:
    objective, samples = choose_objective(**case), with_sets(rollouts(seed=seed % 3), seed, tempered=tempered)
    model = plain("qwen3")
    model.zero_grad()
    loss = step_loss(model, samples, objective)
    torch.autograd.backward(loss)
    expected = loss.detach(), gradients(model)
    dataset = opened(tmp_path_factory.mktemp("data") / "packed", samples, [0] * len(samples))
    (factors,) = step_factors(trajectory_table(dataset, objective), [0], objective)
    loaded, batch, f = packed_model("qwen3"), dataset[0], torch.from_numpy(factors)
    assert batch.terms is not None
    assert batch.terms.kept_ids is not None
    loaded.model.zero_grad()
    if limit is None:
        result = WholeRows(loaded, chunk=5).backward(batch, LossPart(objective, f))
    else:
        result = backward_row(loaded, batch, CarryOptions(limit, chunk=5), objective=objective, factors=f)
    assert_equal((result.loss.item(), gradients(loaded.model)), expected)


def test_a_token_of_several_rollouts_may_have_several_sets() -> None:
    samples = with_sets(rollouts(), 3, tempered=False)
    trained = [
        (tuple(each.tokens[: j + 1]), tuple(each.kept[j])) for each in samples if each.kept for j in each.trained
    ]
    assert len({token for token, _ in trained}) < len(set(trained)) < len(trained)


@pytest.mark.parametrize("limit", [None, 7])
def test_dpo_is_about_the_whole_vocabulary(tmp_path: Path, limit: int | None) -> None:
    objective, samples = choose_objective("dpo", beta=0.7), with_sets(rollouts(), 0, tempered=False)
    expected = step_loss(plain("qwen3"), [replace(each, kept=None) for each in samples], objective)
    dataset = opened(tmp_path / "packed", samples, [0] * len(samples))
    (factors,) = step_factors(trajectory_table(dataset, objective), [0], objective)
    f = torch.from_numpy(factors)
    loaded = packed_model("qwen3")
    loaded.model.zero_grad()
    if limit is None:
        loss = WholeRows(loaded).loss(dataset[0], LossPart(objective, f)).loss
    else:
        loss = backward_row(loaded, dataset[0], CarryOptions(limit), objective=objective, factors=f).loss
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("carry", [None, 7])
@pytest.mark.parametrize("lora", [None, LoraOptions(rank=2)])
def test_the_verification_runs_each_rollout_over_its_sets(
    tmp_path: Path, carry: int | None, lora: LoraOptions | None
) -> None:
    samples = with_sets(rollouts(), 2, tempered=True)
    packed = write_rows(tmp_path / "packed", as_trajectories(samples), [i % 2 for i in range(len(samples))])
    options = TrainOptions(device="cpu", objective=choose_objective("grpo", entropy=0.1), lora=lora)
    run = open_verification(packed, tiny_config(tmp_path / "tiny.json"), options)
    rows = run.trainable_rows
    batches = [run.dataset[row] for row in rows]
    arguments: dict[str, Any] = {"objective": run.options.objective, "factors": run.factors(rows)}
    if carry is not None:
        arguments["backward"] = in_pieces(carry)
    report = verify_gradients(run.loaded, batches, **arguments)
    assert (report.passed, report.dtype) == (True, "float64")
    assert report.worst[1] < 1e-10


@pytest.mark.parametrize("limit", [None, 7])
@pytest.mark.parametrize("ignored", [False, True])
def test_old_logprobs_are_about_the_same_sets(tmp_path: Path, limit: int | None, ignored: bool) -> None:
    samples = with_sets(rollouts(), 5, tempered=True)
    (row,) = read_rows(write_rows(tmp_path / "packed", as_trajectories(samples), [0] * len(samples)))
    options = ScoreOptions(loss_chunk=3, carry=limit, ignore_temperature=ignored)
    scores = np.stack(term_scores(packed_model("qwen3"), [row], options)[0][:2])
    if ignored:
        samples = [replace(each, kept=None, temperatures=None) for each in samples]
    assert row.terms is not None
    for i, name in enumerate(row.trajectory_ids):
        with torch.no_grad():
            alone = [list(values.values()) for values in own_logprobs(plain("qwen3"), samples[int(name[1:])])]
        np.testing.assert_allclose(scores[:, row.terms.trajectory == i], np.array(alone), rtol=1e-9, atol=1e-12)


def test_a_batch_in_memory_is_scored_over_its_sets() -> None:
    samples, loaded = with_sets(rollouts(), 4, tempered=True), packed_model("qwen3")
    ids = [torch.tensor(each.tokens) for each in samples]
    scored = [torch.tensor([j in each.trained for j in range(len(each.tokens))]) for each in samples]
    heat = [torch.tensor(each.temperatures) for each in samples]
    sets = [each.kept for each in samples]
    loaded.model.zero_grad()
    found = tree_logprobs_like(loaded.causal, ids, None, scored, temperature=heat, kept_ids=sets)
    torch.autograd.backward(torch.cat([torch.cat(each).sum()[None] for each in found]).sum())
    ours = gradients(loaded.model)
    model = plain("qwen3")
    model.zero_grad()
    total: Any = 0
    for i, sample in enumerate(samples):
        for expected, values in zip(own_logprobs(model, sample), found, strict=True):
            total = total + sum(expected.values())
            for j, value in expected.items():
                torch.testing.assert_close(values[i][j], value, rtol=1e-9, atol=1e-12)
    torch.autograd.backward(total)
    assert worst_error(ours, gradients(model)) < 1e-9


@pytest.mark.parametrize(
    ("sets", "fault"),
    [
        ([[[], [3]]], "sequence 0: kept_ids of trained token 0 lack the sampled id 2"),
        ([[[], [2, 2]]], "sequence 0: kept_ids of trained token 0 repeat the id 2"),
        ([[[2]]], "sequence 0: kept_ids has 1 lists for 2 tokens"),
        ([None, None], "kept_ids has 2 entries; expected a list with one entry for each of 1 sequences"),
        (np.zeros((1, 2)), "kept_ids has the type ndarray"),
    ],
)
def test_sets_that_do_not_belong_to_a_batch_are_refused(sets: Any, fault: str) -> None:
    assert f"plan_batch: {fault}" in refusal(plan_batch, [torch.tensor([1, 2])], kept_ids=sets)


def test_ids_outside_of_the_vocabulary_are_refused() -> None:
    lists = RaggedArray.of([[2, VOCABULARY]], np.int32)
    trie = build_trie([make("a", [1, 2], reward=1.0, kept_ids=lists)])
    (row,) = pack_rows(trie, plan_rows(trie, capacity=9, method="contiguous"))
    message = f"its vocabulary ends at {VOCABULARY - 1}, but a kept set has the token id {VOCABULARY}"
    with pytest.raises(TreepackError, match=message):
        prepare_batch(packed_model("qwen3"), make_batch(row))
    assert "the batch contains the token id" in refusal(
        tree_logprobs_like, packed_model("qwen3").causal, [torch.tensor([1, 2])], kept_ids=[[[], [2, VOCABULARY]]]
    )
