"""Losses of distillation on packed rows equal the losses of trajectories alone, in float64 to 1e-9."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support.oracle_distillation import bucketed, distillation_loss, divergence_of
from support.oracle_model import gradients, tiny_model, worst_error
from support.oracle_objectives import Rollout
from support.packed_objectives import opened, packed_model, plain, rollouts
from treepack.carry.backward import CarryOptions, backward_row, runner_of
from treepack.data.dataset import PackedDataset
from treepack.data.joined import join_rows
from treepack.data.teacher_law import TeacherLaw, concatenate_laws
from treepack.errors import TreepackError
from treepack.model.forward import WholeRows
from treepack.model.head import distribution_loss
from treepack.model.head.logit_map import LogitMap, OutputLayer
from treepack.model.head.token_loss import tree_scores
from treepack.model.loaded import LoadedModel
from treepack.model.verify.gradients import verify_gradients
from treepack.objectives.denominators import step_factors, trajectory_table
from treepack.objectives.distillation import divergence
from treepack.objectives.objective import Objective, choose_objective
from treepack.objectives.row_numbers import LossPart, ScoreRequest
from treepack.train.teacher import add_teacher

TOLERANCE = 1e-9
HIDDEN, WORDS = 5, 11
BETAS = (0.0, 0.3, 1.0)


@functools.cache
def teacher_model(*, packed: bool) -> Any:
    """A model of the same vocabulary with other weights and another width."""
    return tiny_model("qwen3", attention="treepack_reference" if packed else "sdpa", hidden_size=24)


def teacher() -> LoadedModel:
    packed_model("qwen3")  # registers the attention
    return LoadedModel(teacher_model(packed=True), "teacher", "reference", ())


def with_top_words(batch: Any, top_k: int, limit: int | None) -> Any:
    """The row with the teacher's `top_k` words, as a packed directory has them."""
    terms = batch.terms
    temperature = 1.0 if terms.temperature is None else terms.temperature
    runner = runner_of(teacher(), batch, limit)
    scores = runner.scores(batch, terms.tokens, ScoreRequest(top_k=top_k), temperature=temperature)
    assert scores.top_logprobs is not None
    assert scores.logprobs is not None
    law = TeacherLaw(scores.top_logprobs, scores.top_words)
    return replace(batch, terms=replace(terms, teacher=law, teacher_logprob=scores.logprobs[terms.index.long()]))


def step_of(
    dataset: PackedDataset, objective: Objective, *, top_k: int | None, limit: int | None = None, joined: bool = False
) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    """Return loss, gradients and sums of a step over all rows: whole, in pieces of `limit` tokens, or joined."""
    every, student = list(range(len(dataset))), packed_model("qwen3")
    factors = [torch.from_numpy(f) for f in step_factors(trajectory_table(dataset, objective), every, objective)]
    student.model.zero_grad()

    def taught(row: int) -> Any:
        if top_k is None:
            return add_teacher(dataset[row], teacher(), objective, chunk=4, limit=limit)
        return with_top_words(dataset[row], top_k, limit)

    batches = [taught(row) for row in every]
    if joined and top_k is not None:
        batches, factors = [join_rows(batches, multiple=8)], [torch.cat(factors)]
    total, sums = 0.0, dict[str, float]()
    for batch, factor in zip(batches, factors, strict=True):
        if limit is None:
            result = WholeRows(student, 5).backward(batch, LossPart(objective, factor))
        else:
            result = backward_row(student, batch, CarryOptions(limit, chunk=5), objective=objective, factors=factor)
        total += result.loss.item()
        sums = {name: sums.get(name, 0.0) + float(value) for name, value in result.sums.items()}
    return total, gradients(student.model), sums


CASES: list[dict[str, Any]] = [
    {"name": "distill", "distill_beta": 0.0},
    {"name": "distill", "distill_beta": 0.3, "denominator": "trajectory"},
    {"name": "distill"},
    {"name": "opd"},
    {"name": "opd", "teacher_baseline": True, "clip_low": 0.05, "clip_high": 0.05},
    {"name": "opd", "teacher_baseline": True, "distill": 0.2, "entropy": 0.1},
    {"name": "grpo", "distill": 0.4, "distill_beta": 0.7, "kl": 0.1, "entropy": 0.1},
    {"name": "grpo", "teacher_kl": 0.3, "importance_cap": 1.1},
    {"name": "gspo", "distill": 0.4, "distill_beta": 0.0, "clip_low": 0.03, "clip_high": 0.04},
    {"name": "gmpo", "teacher_kl": 0.5, "teacher_baseline": True, "clip_low": 0.1, "clip_high": 0.1},
]


def tempered(samples: tuple[Rollout, ...]) -> list[Rollout]:
    rng = np.random.default_rng(7)
    kinds = [0.5, 1.0, 1.5]
    return [replace(r, temperatures=[kinds[int(rng.integers(3))]] * len(r.tokens)) for r in samples]


# Every second case with the whole vocabulary; the slow tests have all.
@pytest.mark.parametrize(
    ("case", "top_k"),
    [
        pytest.param(case, top_k, marks=[] if top_k == 3 or (top_k is None and i % 2) else [pytest.mark.slow])
        for i, case in enumerate(CASES)
        for top_k in (None, 3, 60)
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_loss_and_gradients_are_those_of_trajectories_alone(
    tmp_path: Path, case: dict[str, Any], top_k: int | None
) -> None:
    objective = choose_objective(**case, teacher="teacher")
    samples = tempered(rollouts(seed=len(str(case)), count=8))
    has_old = "importance_cap" in case or objective.loss != "ppo"
    without = [] if has_old else ["old_logprobs"]
    model = plain("qwen3")
    model.zero_grad()
    words = None if top_k is None else min(top_k, 50)
    loss = distillation_loss(model, teacher_model(packed=False), samples, objective, top_k=words, has_old=has_old)
    torch.autograd.backward(loss)
    expected = gradients(model)
    # Whole rows, joined to one if the teacher's words are in them, and rows in pieces.
    ways: list[dict[str, Any]] = [{} if top_k is None else {"joined": True}, {"limit": 6}]
    for i, way in enumerate(ways):
        dataset = opened(tmp_path / str(i), samples, [j % 2 for j in range(8)], without=without)
        total, grads, sums = step_of(dataset, objective, top_k=top_k, **way)
        assert total == pytest.approx(loss.item(), rel=TOLERANCE)
        assert worst_error(grads, expected) <= TOLERANCE
        assert ("divergence" in sums) == objective.reads_law
        assert ("teacher_kl" in sums) == bool(objective.teacher_kl)
        assert ("clip_fraction_low" in sums) == ("zero_advantage" in sums) == (case["name"] != "distill")


def test_rows_verify_against_trajectories_alone(tmp_path: Path) -> None:
    objective = choose_objective("grpo", distill=0.5, distill_beta=0.5, teacher_kl=0.2, teacher="teacher")
    dataset = opened(tmp_path / "packed", tempered(rollouts(count=6)), [0] * 6)
    factors = [torch.from_numpy(f) for f in step_factors(trajectory_table(dataset, objective), [0], objective)]
    for batch in (add_teacher(dataset[0], teacher(), objective, chunk=8), with_top_words(dataset[0], 4, None)):
        report = verify_gradients(packed_model("qwen3"), [batch], objective=objective, factors=factors)
        assert report.passed


def random_laws(rng: torch.Generator, count: int, top_k: int | None) -> tuple[TeacherLaw, Tensor]:
    """The laws of `count` tokens, of which some have fewer words than others, and the teacher's logits [n, V]."""
    logits = torch.randn(count, WORDS, generator=rng, dtype=torch.float64) * 2
    if top_k is None:
        weight = torch.linalg.pinv(torch.randn(HIDDEN, WORDS, generator=rng, dtype=torch.float64))
        states = torch.randn(count, HIDDEN, generator=rng, dtype=torch.float64)
        return TeacherLaw(states, logits=lambda each: each @ weight.t()), states @ weight.t()
    parts = []
    for i in range(count):
        values, ids = logits[i : i + 1].log_softmax(-1).topk(max(1, top_k - i % 2))
        parts.append(TeacherLaw(values, ids))
    return concatenate_laws(parts), logits


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distribution_loss, "BLOCK", 3)


@pytest.mark.usefixtures("small_blocks")
@given(
    st.integers(2, 20), st.sampled_from(BETAS), st.sampled_from([None, 1, 4, WORDS]), st.booleans(),
    st.sampled_from([2, 5, 100]), st.sampled_from([LogitMap(), LogitMap(0.5, 2.0)]), st.integers(0, 99),
)  # fmt: skip
def test_divergences_and_gradients_are_those_of_the_whole_softmax(
    length: int, beta: float, top_k: int | None, tempered: bool, chunk: int, logit_map: LogitMap, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    shapes = [(length, HIDDEN), (WORDS, HIDDEN), (WORDS,)]
    inputs = [torch.randn(each, generator=rng, dtype=torch.float64).requires_grad_() for each in shapes]
    hidden, weight, bias = inputs
    parent = torch.tensor([-1, *(int(torch.randint(j, (), generator=rng)) for j in range(1, length))])
    tokens, ids = torch.arange(1, length), torch.randint(WORDS, (length,), generator=rng)
    temperature = torch.rand(length - 1, generator=rng, dtype=torch.float64) + 0.5 if tempered else None
    law, logits = random_laws(rng, length - 1, top_k)
    layer = OutputLayer(weight, bias, logit_map)
    divisors = 1.0 if temperature is None else temperature
    logprobs, _, found = tree_scores(
        hidden, layer, (tokens, ids, parent), temperature=divisors, teacher=(law, beta), chunk=chunk
    )
    scale = torch.ones(length - 1, dtype=torch.float64) if temperature is None else temperature
    student = (layer.logits(hidden[parent[tokens]]) / scale[:, None]).softmax(-1)
    expected = []
    for i in range(length - 1):
        if law.ids is None:
            expected.append(divergence_of(student[i], (logits[i] / scale[i]).softmax(-1), beta))
            continue
        words = law.ids[i, law.values[i] > -torch.inf]
        q = bucketed(logits[i].softmax(-1), words)
        expected.append(divergence_of(bucketed(student[i], words), q, beta))
    twin = torch.stack(expected)
    torch.testing.assert_close(found, twin, rtol=1e-9, atol=1e-12)
    # Their own slopes, and those of log-probabilities beside them.
    slopes = torch.randn(length - 1, generator=rng, dtype=torch.float64)
    own = student.gather(-1, ids[tokens][:, None]).squeeze(-1).log()
    for ours, theirs in ((found, twin), (found + logprobs, twin + own)):
        exact = torch.autograd.grad((theirs * slopes).sum(), inputs, retain_graph=True)
        for got, want in zip(torch.autograd.grad((ours * slopes).sum(), inputs, retain_graph=True), exact, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def test_the_rest_keeps_a_reverse_kl_from_falling_when_the_student_leaves_the_words() -> None:
    teacher_law, student = torch.tensor([0.6, 0.3, 0.1]).double(), torch.tensor([0.02, 0.01, 0.97]).double()
    with_rest = divergence(student.log()[None], teacher_law.log()[None], 1.0)[0]
    without = divergence(student.log()[None, :2], teacher_law.log()[None, :2], 1.0)[0]
    assert without < 0 < with_rest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "grpo", "distill_beta": 0.5}, "give distill too"),
        ({"name": "grpo", "teacher_baseline": True}, "teacher_kl, which is 0"),
        ({"name": "opd", "teacher_baseline": True, "distill": 1.0, "distill_beta": 0.5}, "reverse KL"),
        ({"name": "grpo", "teacher": "models/large"}, "the teacher has no use"),
        ({"name": "distill", "distill_beta": 1.5}, "0 to 1"),
        ({"name": "dpo", "distill": 1.0}, "not an option of the loss dpo"),
    ],
)
def test_options_without_a_use_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TreepackError, match=message):
        choose_objective(**options)
