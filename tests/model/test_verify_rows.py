"""`train --verify` on rows that do not fit into memory: a part is compared, and the part is a row like any other."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.oracle_model import Sample, make_row, packed_directory, sample_sets, tiny_config
from support.refusal import refusal
from support.strategies import make
from treepack.data.batch import Batch, make_batch
from treepack.data.dataset import PackedDataset
from treepack.data.row_parts import RowPart, neighbours_within, restrict_row
from treepack.errors import TreepackError
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel
from treepack.objectives.denominators import step_factors, trajectory_table
from treepack.objectives.objective import choose_objective
from treepack.train import verification
from treepack.train.verification import verify_rows
from treepack.trajectory import Trajectory


def equal_weights(samples: list[Sample]) -> list[Sample]:
    """Return the samples with weight 1 at every token except the first."""
    return [Sample(s.tokens, (0.0, *[1.0] * (len(s.tokens) - 1))) for s in samples]


@given(sample_sets(), st.data())
def test_a_part_of_a_row_is_the_row_of_its_trajectories(samples: list[Sample], data: st.DataObject) -> None:
    samples = equal_weights(samples)
    chosen = data.draw(st.lists(st.sampled_from(range(len(samples))), min_size=1, unique=True).map(sorted))
    # They share the tokens before the start: else those after it would be other nodes than in a row without the start.
    columns = zip(*(samples[i].tokens for i in chosen), strict=False)
    shared = len([*takewhile(lambda column: len(set(column)) == 1, columns)])
    start = data.draw(st.integers(0, max(0, min(shared, *(len(samples[i].tokens) - 1 for i in chosen), 99))))
    end = start + data.draw(st.integers(1, 20))
    part = restrict_row(make_batch(make_row(samples)), RowPart(tuple(chosen), start, end))
    cut = equal_weights([Sample(samples[i].tokens[start:end], ()) for i in chosen])
    expected = make_batch(make_row(cut))
    for name in "input_ids position_ids parent subtree_end scale loss_weight trajectory_ends".split():
        assert torch.equal(getattr(part, name), getattr(expected, name)), name
    assert part.trajectory_ids == tuple(str(i) for i in chosen)
    assert (part.num_tokens, part.tokens_flat) == (expected.num_tokens, expected.tokens_flat)
    assert part.total_weight == expected.total_weight


@given(sample_sets(), st.integers(2, 40))
def test_groups_of_neighbours_have_every_trajectory_once_and_stay_within_the_limit(
    samples: list[Sample], limit: int
) -> None:
    batch = make_batch(make_row(equal_weights(samples)))
    groups = neighbours_within(batch, limit)
    order = np.argsort(batch.trajectory_ends.numpy(), kind="stable").tolist()
    assert [i for group in groups for i in group] == order
    sizes = [restrict_row(batch, RowPart(tuple(sorted(group)), 0, 1000)).num_tokens for group in groups]
    longest = [max(len(samples[i].tokens) for i in group) for group in groups]
    assert all(size <= limit or size == long for size, long in zip(sizes, longest, strict=True))
    # A group ends only if the next trajectory does not fit.
    for k in range(len(groups) - 1):
        more = RowPart(tuple(sorted([*groups[k], groups[k + 1][0]])), 0, 1000)
        assert restrict_row(batch, more).num_tokens > limit


@pytest.mark.parametrize(
    ("trained", "places"), [(3, range(10)), (9, range(10)), (10, range(1, 11)), (29, range(20, 30))]
)
def test_of_a_trajectory_that_is_too_long_the_first_trained_token_is_compared(
    loaded: LoadedModel, trained: int, places: range
) -> None:
    weights = [float(i >= trained) for i in range(30)]
    batch = make_batch(make_row([Sample(tuple(range(30)), tuple(weights))]))
    (part,) = verify_rows(loaded, [batch], max_tokens=10).batches
    assert part.input_ids.tolist() == [*places]
    assert part.loss_weight.tolist() == [weights[i] if i > places.start else 0.0 for i in places]


def test_the_tokens_one_by_one_have_a_limit_too(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = tuple(range(40))
    samples = equal_weights([Sample((*trunk, 41 + i), ()) for i in range(6)])
    batch = make_batch(make_row(samples))
    assert (batch.num_tokens, batch.tokens_flat) == (46, 6 * 41)
    (whole,) = verify_rows(loaded, [batch]).batches
    assert whole.tokens_flat == batch.tokens_flat
    monkeypatch.setitem(verification._MAX_TOKENS, "cpu", (2_048, 130))
    (part,) = verify_rows(loaded, [batch]).batches
    assert (part.num_tokens, part.tokens_flat) == (43, 3 * 41)


def test_trajectories_that_train_nothing_are_left_out(loaded: LoadedModel) -> None:
    silent = [Sample((1, 2, 3, 30 + i), (0.0,) * 4) for i in range(4)]
    batch = make_batch(make_row([*silent, Sample((1, 2, 4, 5), (0.0, 0.0, 0.0, 1.0))]))
    (part,) = verify_rows(loaded, [batch], max_tokens=6).batches
    assert part.input_ids.tolist() == [1, 2, 4, 5]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return packed_directory(tmp_path / "packed", rollouts(), capacity=400)


def rollouts() -> list[Trajectory]:
    generator = np.random.default_rng(0)
    return [
        make(
            f"t{i}",
            [i // 3, *range(10, 30), 5, *generator.integers(20, 24, 28).tolist()],
            spans=[(21, 50, 1.0)],
            advantage=float(i % 3 - 1),
        )
        for i in range(9)
    ]


def load(tmp_path: Path) -> LoadedModel:
    return load_model(tiny_config(tmp_path / "tiny.json"), attention="reference", dtype=torch.float64)


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedModel:
    return load(tmp_path)


def test_what_does_not_fit_is_compared_in_part(packed: Path, tmp_path: Path) -> None:
    loaded, dataset = load(tmp_path), PackedDataset(packed)
    batches = list(dataset)
    whole = verify_rows(loaded, batches)
    assert [len(batch.trajectory_ids) for batch in whole.batches] == [9]
    part = verify_rows(loaded, batches, max_tokens=120)
    assert 1 < part.gradients.num_trajectories < 9
    assert part.batches[0].num_tokens <= 120 < batches[0].num_tokens
    assert part.gradients.passed
    assert part.gradients.worst[1] < 1e-12
    assert not any("forward" in vars(module) for module in loaded.model.modules())  # nothing recomputes any more
    wrong = [replace(batches[0], subtree_end=torch.full_like(batches[0].subtree_end, batches[0].num_tokens))]
    assert not verify_rows(loaded, wrong, max_tokens=120).gradients.passed


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_terms_are_compared_in_part(packed: Path, tmp_path: Path, name: str) -> None:
    loaded, dataset, objective = load(tmp_path), PackedDataset(packed, terms=True), choose_objective(name)
    batches = list(dataset)
    factors = [torch.from_numpy(f) for f in step_factors(trajectory_table(dataset, objective), [0], objective)]
    part = verify_rows(loaded, batches, objective=objective, factors=factors, max_tokens=120)
    assert 0 < part.gradients.num_trajectories < 9
    terms = part.batches[0].terms
    assert terms is not None
    assert len(terms.index) == 29 * part.gradients.num_trajectories
    assert {field.name for field in fields(terms) if getattr(terms, field.name) is None} == {
        field.name for field in fields(terms) if getattr(batches[0].terms, field.name) is None
    }
    assert part.gradients.passed
    assert part.gradients.loss_error < 1e-12


def fail_above(loaded: LoadedModel, limit: int) -> None:
    """Make the model run out of memory in sequences of more than `limit` tokens."""

    def fails(_: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if keywords["input_ids"].shape[1] > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")

    loaded.model.base_model.register_forward_pre_hook(fails, with_kwargs=True)


def test_if_memory_runs_out_half_of_the_tokens_are_tried(packed: Path, tmp_path: Path) -> None:
    loaded = load(tmp_path)
    fail_above(loaded, 80)
    result = verify_rows(loaded, list(PackedDataset(packed)))
    assert 40 <= result.batches[0].num_tokens <= 80
    assert result.gradients.passed


def test_if_nothing_fits_the_error_is_one_sentence(packed: Path, tmp_path: Path) -> None:
    loaded = load(tmp_path)
    fail_above(loaded, 1)
    with pytest.raises(
        TreepackError,
        match=r"out of memory for the gradients of .* plan \(\d+ tokens\), and [\d.]+ GiB are free; verify on a GPU",
    ):
        verify_rows(loaded, list(PackedDataset(packed)))


def test_gradients_that_are_all_zero_prove_nothing(packed: Path, tmp_path: Path) -> None:
    loaded, batch = load(tmp_path), next(iter(PackedDataset(packed, terms=True)))
    assert isinstance(batch, Batch)
    zero = [torch.zeros(len(batch.trajectory_ids), dtype=torch.float64)]
    assert "every gradient is 0, so nothing is compared" in refusal(
        verify_rows, loaded, [batch], objective=choose_objective("grpo"), factors=zero
    )
