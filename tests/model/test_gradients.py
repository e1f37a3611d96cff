"""The main promise: gradients of packed rows equal the gradients of every trajectory run alone.

All comparisons are in float64, over every parameter, with a relative tolerance of 1e-9. The oracle
(`oracle_model.alone`) is the plain model of transformers with its own attention, and one forward pass per trajectory.
Packed rows go through the whole pipeline: trie, plan, rows, attention, loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support.oracle_model import (
    CONFIGS,
    VOCABULARY,
    Sample,
    alone,
    once,
    sample_sets,
    tiny_model,
    worst_error,
)
from support.packed_gradients import TOLERANCE, assert_equal, gradients_of, packed, plain
from treepack.attention import register
from treepack.data.batch import Batch, make_batch
from treepack.model.layers import checkpoint_layers
from treepack.model.loaded import LoadedModel
from treepack.pack.plan.planning import FOREST_METHODS, METHODS, packed_trie, plan_rows
from treepack.pack.plan.problem import RowLimits
from treepack.pack.rows import pack_rows
from treepack.trajectory import Tokens, Trajectory, spans_of_mask
from treepack.trie.builders.in_memory import build_trie

KINDS = sorted(CONFIGS)
ATTENTIONS = ["reference", "flex"]
# The others belong to the slow tests.
SOME_KINDS = [pytest.param(k, marks=[] if k == "qwen3" else [pytest.mark.slow]) for k in KINDS]


@contextmanager
def checkpointing(model: Any) -> Iterator[None]:
    model.train()  # transformers checkpoints layers in training mode only
    checkpoint_layers(model)
    assert sum(getattr(m, "gradient_checkpointing", False) for m in model.base_model.modules()) >= 2
    yield
    model.base_model.apply(_without_checkpoints)
    model.eval()


def _without_checkpoints(module: Any) -> None:
    if getattr(module, "gradient_checkpointing", False):
        module.gradient_checkpointing = False


def as_trajectories(samples: Sequence[Sample], groups: Sequence[str]) -> list[Trajectory]:
    trajectories = []
    for i, (sample, group) in enumerate(zip(samples, groups, strict=True)):
        content = Tokens(np.array(sample.tokens, np.int32), *spans_of_mask(np.array(sample.weights)))
        trajectories.append(Trajectory(str(i), f"made:{i}", content, group))
    return trajectories


def as_batches(
    samples: Sequence[Sample],
    *,
    capacity: int | RowLimits,
    groups: Sequence[str] | None = None,
    multiple: int = 1,
    method: str = "auto",
    ranks: int = 1,
    **options: Any,
) -> list[Batch]:
    """Pack `samples` with the whole pipeline."""
    trie = build_trie(as_trajectories(samples, groups or ["g"] * len(samples)))
    plan = plan_rows(trie, capacity=capacity, method=method, multiple_of=ranks)
    return [make_batch(row, multiple=multiple) for row in pack_rows(packed_trie(trie, method), plan, **options)]


def longest(samples: Sequence[Sample]) -> int:
    return max(len(sample.tokens) for sample in samples)


def has_weight(samples: Sequence[Sample]) -> bool:
    return any(any(sample.weights) for sample in samples)


@pytest.mark.parametrize("kind", SOME_KINDS)
@given(samples=sample_sets(), room=st.integers(0, 20), semantics=st.sampled_from(["branch", "once"]), data=st.data())
@settings(max_examples=16, derandomize=True, deadline=None)
def test_packed_gradients_are_the_sum_over_trajectories(
    kind: str, samples: list[Sample], room: int, semantics: str, data: st.DataObject
) -> None:
    assume(has_weight(samples))
    multiple = data.draw(st.sampled_from([1, 16]))
    batches = as_batches(samples, capacity=longest(samples) + room, multiple=multiple, semantics=semantics)
    expected = alone(plain(kind), once(samples) if semantics == "once" else samples)
    for attention in ATTENTIONS:
        assert_equal(gradients_of(packed(kind, attention), batches, chunk=5), expected)


@pytest.mark.parametrize("method", [*METHODS, *FOREST_METHODS])
@given(samples=sample_sets(), room=st.integers(0, 20), ranks=st.integers(1, 2))
@settings(max_examples=5, derandomize=True, deadline=None)
def test_no_method_changes_gradients(method: str, samples: list[Sample], room: int, ranks: int) -> None:
    assume(has_weight(samples))
    # As many trajectories as a multiple of the ranks: three that need a row each cannot fill four rows.
    samples = [*samples, *samples[: -len(samples) % ranks]]
    size = longest(samples)
    # A path of `size` tokens has size * (size + 1) / 2 pairs and at most `size` terms: every trajectory fits a row.
    pairs, terms = size * (size + 1) // 2 + 5 * room, size + room
    batches = as_batches(samples, capacity=RowLimits(size + room, pairs, terms), method=method, ranks=ranks)
    assert_equal(gradients_of(packed("qwen3", "reference"), batches), alone(plain("qwen3"), samples))


@pytest.mark.parametrize("kind", SOME_KINDS)
@given(samples=sample_sets())
@settings(max_examples=5, derandomize=True, deadline=None)
def test_gradient_checkpointing_changes_nothing(kind: str, samples: list[Sample]) -> None:
    assume(has_weight(samples))
    batches, expected = as_batches(samples, capacity=1000), alone(plain(kind), samples)
    for attention in ATTENTIONS:
        loaded = packed(kind, attention)
        with checkpointing(loaded.model):
            result = gradients_of(loaded, batches)
        assert_equal(result, expected)


def branches_at(offset: int) -> list[Sample]:
    """Return a stem of `offset` tokens, a trajectory that ends there, and branches: short, long and branching again."""
    # ids 0, 1 and 2 start the branches, so the stem uses the others
    ids = np.random.default_rng(offset).integers(3, VOCABULARY, 200).tolist()
    stem = tuple(ids[:offset])
    # (1, *ids[100:103], 2) is there twice: equal trajectories end at one token
    endings = [(), (0,), (1, *ids[100:105]), (1, *ids[100:103], 2), (1, *ids[100:103], 2), (2, *ids[150:170])]
    branches = [stem + ending for ending in endings if stem + ending]
    return [Sample(tokens, (0.0, *[1.0] * (len(tokens) - 1))) for tokens in branches]


# All offsets within a block of 64 tokens, so that branches start at every place of a tile.
@pytest.mark.parametrize("offset", [pytest.param(i, marks=[pytest.mark.slow] if i % 9 else []) for i in range(64)])
def test_branches_may_start_at_every_offset(offset: int) -> None:
    samples = branches_at(offset)
    batches, expected = as_batches(samples, capacity=1000), alone(plain("qwen3"), samples)
    for attention in ATTENTIONS:
        assert_equal(gradients_of(packed("qwen3", attention), batches), expected)


def normalise(samples: Sequence[Sample], groups: Sequence[str], normalize: str) -> list[Sample]:
    """Divide every weight by the sum of its trajectory or of its group, or leave it unchanged."""
    sums = [sum(sample.weights) for sample in samples]
    # sums [1, 2, 4] of groups a, b, a -> per_group {a: 5, b: 2}
    per_group = {g: sum(s for s, of in zip(sums, groups, strict=True) if of == g) for g in groups}
    by = {"token": [1.0] * len(sums), "trajectory": sums, "group": [per_group[g] for g in groups]}[normalize]
    return [
        Sample(sample.tokens, tuple(weight / total if weight else 0.0 for weight in sample.weights))
        for sample, total in zip(samples, by, strict=True)
    ]


@pytest.mark.parametrize("normalize", ["token", "trajectory", "group"])
@given(samples=sample_sets(), data=st.data())
@settings(max_examples=12, derandomize=True, deadline=None)
def test_a_step_is_the_mean_of_its_normalisation(normalize: str, samples: list[Sample], data: st.DataObject) -> None:
    assume(has_weight(samples))
    groups = data.draw(st.lists(st.sampled_from("ab"), min_size=len(samples), max_size=len(samples)))
    batches = as_batches(samples, capacity=longest(samples), groups=groups, normalize=normalize)
    weighted = normalise(samples, groups, normalize)
    denominator = sum(sum(sample.weights) for sample in weighted)
    assert sum(batch.total_weight for batch in batches) == pytest.approx(denominator, rel=1e-12)
    assert_equal(gradients_of(packed("llama", "reference"), batches), alone(plain("llama"), weighted))


@pytest.mark.parametrize("kind", KINDS)
def test_two_optimiser_steps_stay_equal(kind: str) -> None:
    register()
    ours = LoadedModel(tiny_model(kind, attention="treepack_reference"), kind, "reference", ())
    theirs = tiny_model(kind)
    steps = [branches_at(7), branches_at(20)]
    optimisers = [torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.1) for m in (ours.model, theirs)]
    for samples in steps:
        batches = as_batches(samples, capacity=longest(samples))
        denominator = sum(batch.total_weight for batch in batches)
        gradients_of(ours, batches)
        alone(theirs, samples)
        for model, optimiser in zip((ours.model, theirs), optimisers, strict=True):
            for parameter in model.parameters():
                parameter.grad /= denominator
            optimiser.step()
    weights = [dict(m.state_dict()) for m in (ours.model, theirs)]
    start = tiny_model(kind).state_dict()  # equal kinds have equal random weights
    assert worst_error(*weights) <= TOLERANCE
    assert worst_error(weights[0], start) > 1e-4, "the steps moved the weights"


# Three kinds of damage that a weak comparison might miss: attention to all earlier tokens of the row, positions counted
# along the row, and labels shifted by one token.


def make_causal(batch: Batch) -> Batch:
    return replace(batch, subtree_end=torch.full_like(batch.subtree_end, len(batch.subtree_end)))


def number_along_row(batch: Batch) -> Batch:
    return replace(batch, position_ids=torch.arange(len(batch.position_ids)))


def shift_parents(batch: Batch) -> Batch:
    return replace(batch, parent=(torch.arange(len(batch.parent)) - 1).clamp(min=0))


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_mask_position_or_parent_does_not_pass(kind: str, attention: str) -> None:
    samples = branches_at(9)
    batches = as_batches(samples, capacity=1000)
    expected = alone(plain(kind), samples)
    loaded = packed(kind, attention)
    assert_equal(gradients_of(loaded, batches), expected)
    for damage in (make_causal, number_along_row, shift_parents):
        result = gradients_of(loaded, [damage(batch) for batch in batches])
        assert worst_error(result[1], expected[1]) > 1e-3, damage.__name__
