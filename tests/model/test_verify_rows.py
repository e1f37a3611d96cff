"""`train --verify` on rows that do not fit into memory: a part is compared, and the part is a row like any other."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import combinations, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from support.oracle_model import Sample, make_row, packed_directory, sample_sets, tiny_config
from support.strategies import make
from support.tiny_families import IS_OLD, tiny_family, transformers_types
from treepack.data.batch import Batch, make_batch
from treepack.data.dataset import PackedDataset
from treepack.errors import TreepackError
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel
from treepack.model.verify.verify_memory import ModelSizes, model_sizes, plan_memory
from treepack.model.verify.verify_subset import RowPart, choose_part, path_to, restrict_row
from treepack.objectives.denominators import step_factors, trajectory_table
from treepack.objectives.objective import choose_objective
from treepack.train.verification import verify_rows
from treepack.trajectory import Trajectory

H100 = 80e9
QWEN3_0_6B = ModelSizes(
    parameters=596_049_920, trained=596_049_920, embeddings=155_582_464, layers=28, hidden=1024, heads=16,
    head_size=128, projections=4096, intermediate=3072, item=4, quadratic=False, reference=False, attention_layers=28,
)  # fmt: skip
QWEN3_8B = ModelSizes(
    parameters=8_190_735_360, trained=8_190_735_360, embeddings=622_329_856, layers=36, hidden=4096, heads=32,
    head_size=128, projections=6144, intermediate=12288, item=4, quadratic=False, reference=False, attention_layers=36,
)  # fmt: skip


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


@given(sample_sets(), st.integers(2, 40), st.integers(2, 60), st.integers(2, 12))
def test_the_part_stays_within_its_limits_and_no_run_of_neighbours_has_more(
    samples: list[Sample], max_tokens: int, max_flat: int, max_depth: int
) -> None:
    batch = make_batch(make_row(equal_weights(samples)))
    assume(batch.total_weight)
    part = choose_part(batch, max_tokens=max_tokens, max_flat=max_flat, max_depth=max_depth)
    row = restrict_row(batch, part)
    assert row.total_weight > 0
    assert row.num_tokens <= max_tokens
    assert row.tokens_flat <= max_flat
    assert int(row.position_ids.max()) < max_depth


@given(sample_sets(), st.integers(8, 40))
def test_if_two_neighbours_fit_whole_no_run_of_neighbours_has_more_trajectories(
    samples: list[Sample], max_tokens: int
) -> None:
    batch = make_batch(make_row(equal_weights(samples)))
    assume(batch.total_weight)
    part = choose_part(batch, max_tokens=max_tokens, max_flat=1000, max_depth=1000)
    order = [i for i in np.argsort(batch.trajectory_ends.numpy(), kind="stable") if len(samples[i].tokens) > 1]
    runs = [
        order[first:last]
        for first, last in combinations(range(len(order) + 1), 2)
        if restrict_row(batch, RowPart(tuple(sorted(order[first:last])), 0, 1000)).num_tokens <= max_tokens
    ]
    assume(max(map(len, runs), default=0) > 1)
    assert (part.start, len(part.trajectories)) == (0, max(map(len, runs)))


def test_a_part_of_long_trajectories_is_where_they_branch() -> None:
    trunk = tuple(range(40))
    samples = equal_weights([Sample((*trunk, *([41 + i] * 20)), ()) for i in range(6)])
    batch = make_batch(make_row(samples))
    part = choose_part(batch, max_tokens=24, max_flat=100, max_depth=30)
    row = restrict_row(batch, part)
    assert part.start > 0
    assert row.num_tokens <= 24
    assert len(part.trajectories) > 1
    assert row.parent.tolist().count(39 - part.start) == len(part.trajectories)  # all branch after the last trunk token


def test_a_part_without_a_trained_token_gets_weights() -> None:
    long = Sample(tuple(range(30)), (*[0.0] * 29, 1.0))
    batch = make_batch(make_row([long]))
    part = restrict_row(batch, choose_part(batch, max_tokens=10, max_flat=10, max_depth=10))
    assert part.position_ids.tolist() == [*range(10)]
    assert part.loss_weight.tolist() == [0.0, *[1.0] * 9]


def test_qwen3_0_6b_fits_an_80_gb_gpu_with_rows_of_32768_tokens_and_8b_with_a_part_of_them() -> None:
    small = plan_memory(QWEN3_0_6B, H100 - 4 * QWEN3_0_6B.parameters, 32_768)
    assert (small.recompute, small.max_tokens, small.max_depth) == (True, 32_768, 32_768)
    large = plan_memory(QWEN3_8B, H100 - 4 * QWEN3_8B.parameters, 32_768)
    assert (large.recompute, large.offload) == (True, True)
    assert 2_048 <= large.max_tokens < 32_768
    assert plan_memory(QWEN3_0_6B, 1e12, 32_768).recompute is False


@given(st.floats(1e8, 1e12), st.floats(1, 10), st.booleans(), st.booleans(), st.integers(2, 1 << 20))
def test_less_memory_never_plans_more_tokens(
    free: float, ratio: float, quadratic: bool, reference: bool, longest: int
) -> None:
    sizes = replace(QWEN3_0_6B, quadratic=quadratic, reference=reference)
    more, less = (plan_memory(sizes, bytes_free, longest) for bytes_free in (free * ratio, free))
    # Each way to save memory allows more tokens, so only plans of one way compare.
    if (more.recompute, more.offload) == (less.recompute, less.offload):
        assert less.max_tokens <= more.max_tokens <= longest
    assert 2 <= less.max_depth <= less.max_tokens <= longest
    assert less.halved().max_tokens == less.max_tokens // 2


def test_a_limit_of_operations_bounds_all_tokens() -> None:
    plan = plan_memory(QWEN3_8B, 1e13, 32_768, max_operations=1e15)
    assert plan.max_flat == int(1e15 / 8 / QWEN3_8B.parameters)
    assert plan_memory(QWEN3_8B, 1e13, 32_768, longest_path=9_000, max_operations=1e15).max_flat < plan.max_flat
    assert plan.max_tokens == plan.max_depth == plan.max_flat < 32_768


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


def free_for(loaded: LoadedModel, tokens: int) -> float:
    """Return the smallest number of free bytes, to a percent, for which the plan allows that many tokens of 400."""
    sizes, free = model_sizes(loaded.model, attention=loaded.attention), 1e5
    while plan_memory(sizes, free, 400).max_tokens < tokens:
        free *= 1.01
    return free


@pytest.mark.parametrize(("kind", "width"), [("qwen3", 8), ("gemma3n_text", 8), ("gemma4_text", 512)])
def test_layers_that_differ_count_with_their_largest_size(kind: str, width: int) -> None:
    if kind not in transformers_types() or (IS_OLD and kind == "gemma4_text"):
        pytest.skip(f"this version of transformers has no {kind}, or no head dimension of its own for its full layers")
    fields: dict[str, Any] = {} if kind == "qwen3" else {"layer_types": ["sliding_attention", "full_attention"]}
    sizes = model_sizes(tiny_family(kind, **fields), attention="reference")
    assert (sizes.head_size, sizes.intermediate) == (width, 48)
    assert sizes.projections == 8 * width  # 4 heads of queries, 2 of keys, 2 of values


def test_recurrent_layers_count_their_scan_and_no_attention() -> None:
    fields: dict[str, Any] = {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 16,
    }
    hybrid = model_sizes(tiny_family("qwen3_5_text", **fields), attention="triton")
    # 2 heads, twice: 9 tensors of the keys, 3 of the values, 6 rows of 64 pairs, and a state of 32 x 16 per 64 tokens.
    assert (hybrid.attention_layers, hybrid.scan) == (1, 2 * 2 * (9 * 32 + 3 * 16 + 6 * 64 + 32 * 16 // 64))
    dense = replace(hybrid, attention_layers=4, scan=0)
    assert hybrid.layer_bytes == dense.layer_bytes + 8 * hybrid.scan  # float64
    limits = [plan_memory(each, 1e13, 1 << 20, longest_path=9_000, max_operations=1e9) for each in (hybrid, dense)]
    assert limits[0].max_flat > limits[1].max_flat


def test_what_does_not_fit_is_compared_in_part(packed: Path, tmp_path: Path) -> None:
    loaded, dataset = load(tmp_path), PackedDataset(packed)
    batches = list(dataset)
    whole = verify_rows(loaded, batches)
    assert (whole.plan.recompute, [len(batch.trajectory_ids) for batch in whole.batches]) == (False, [9])
    free = free_for(loaded, 120)
    part = verify_rows(loaded, batches, free=free)
    assert part.plan.recompute
    assert 0 < part.gradients.num_trajectories < 9
    assert part.batches[0].num_tokens <= part.plan.max_tokens < batches[0].num_tokens
    assert part.gradients.passed
    assert part.gradients.worst[1] < 1e-12
    assert not any("forward" in vars(module) for module in loaded.model.modules())  # nothing recomputes any more
    wrong = [replace(batches[0], subtree_end=torch.full_like(batches[0].subtree_end, batches[0].num_tokens))]
    assert not verify_rows(loaded, wrong, free=free).gradients.passed


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_terms_are_compared_in_part(packed: Path, tmp_path: Path, name: str) -> None:
    loaded, dataset, objective = load(tmp_path), PackedDataset(packed, terms=True), choose_objective(name)
    batches = list(dataset)
    factors = [torch.from_numpy(f) for f in step_factors(trajectory_table(dataset, objective), [0], objective)]
    part = verify_rows(loaded, batches, objective=objective, factors=factors, free=free_for(loaded, 120))
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
    assert 40 <= result.plan.max_tokens <= 80
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
    with pytest.raises(TreepackError, match="every gradient is 0, so nothing is compared"):
        verify_rows(loaded, [batch], objective=choose_objective("grpo"), factors=zero)


def test_a_path_starts_at_its_root() -> None:
    assert path_to(np.array([-1, 0, 1, 0, 3]), 4).tolist() == [0, 3, 4]
