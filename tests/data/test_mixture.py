"""Several packed directories as one dataset, and the order in which a mixture takes their rows."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from support.command_line import Run
from support.oracle_model import packed_directory, tiny_config, write_rows
from support.refusal import refusal
from support.strategies import make
from treepack.data.blocks import cut_blocks, turns
from treepack.data.dataset import PackedDataset
from treepack.data.mixture import MixedDataset, mixed_blocks, mixed_rows, open_packed, source_names
from treepack.errors import TreepackError
from treepack.files.manifest_entries import TokenizerEntry
from treepack.objectives.denominators import check_columns, step_factors, trajectory_table
from treepack.objectives.objective import choose_objective
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.schedule import plan_steps
from treepack.train.setup.opening import open_run
from treepack.trajectory import Trajectory

OPTIONS = TrainOptions(device="cpu", lr=1e-2, rows_per_step=4, steps=3, checkpoint_every=0)


def rollouts(name: str, count: int, *, step: int | None = None) -> list[Trajectory]:
    first = len(name)
    return [
        make(f"{name}{i}", [first + i, *range(5 + i % 3)], group=f"g{i // 2}", step=step, reward=i % 2, advantage=1.0)
        for i in range(count)
    ]


@pytest.fixture
def directories(tmp_path: Path) -> list[Path]:
    """Return two directories with one trajectory per row: `a` with 5 rows, `bb` with 2."""
    return [write_rows(tmp_path / name, rollouts(name, count), range(count)) for name, count in (("a", 5), ("bb", 2))]


@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4), data=st.data(), seed=st.integers(0, 9))
def test_a_mixture_keeps_its_shares_and_repeats_no_row_before_the_others(
    sizes: list[int], data: st.DataObject, seed: int
) -> None:
    shares = data.draw(st.lists(st.floats(0.1, 10), min_size=len(sizes), max_size=len(sizes)))
    firsts = np.cumsum([0, *sizes])
    sources = [np.arange(firsts[s], firsts[s + 1]) for s in range(len(sizes))]
    rows = list(itertools.islice(mixed_rows(sources, shares, seed=seed), 60))
    owners = [int(np.searchsorted(firsts, row, side="right")) - 1 for row in rows]
    for length in range(1, len(rows) + 1):
        counts = Counter(owners[:length])
        for source, share in enumerate(shares):
            assert abs(counts[source] - share / sum(shares) * length) < max(2, len(sizes))
    for source, size in enumerate(sizes):
        stream = [row for row, owner in zip(rows, owners, strict=True) if owner == source]
        for start in range(0, len(stream), size):
            part = stream[start : start + size]
            assert len(set(part)) == len(part)


@given(
    blocks=st.integers(1, 6),
    sizes=st.lists(st.integers(6, 20), min_size=1, max_size=3),
    data=st.data(),
    seed=st.integers(0, 9),
)
def test_blocks_of_a_mixture_take_turns_and_keep_its_shares(
    blocks: int, sizes: list[int], data: st.DataObject, seed: int
) -> None:
    shares = data.draw(st.lists(st.floats(0.1, 10), min_size=len(sizes), max_size=len(sizes)))
    owners = np.repeat(np.arange(len(sizes)), sizes)
    block_of = cut_blocks(blocks, owners)
    pieces = [[np.flatnonzero((owners == s) & (block_of == b)) for b in range(blocks)] for s in range(len(sizes))]
    rows = np.array(list(itertools.islice(mixed_blocks(pieces, shares, seed=seed), 20 * blocks)))
    assert block_of[rows].tolist() == np.tile(turns(blocks), 20).tolist()
    for block in (None, *range(blocks)):
        own = rows if block is None else rows[block_of[rows] == block]
        for source, share in enumerate(shares):
            counts = np.cumsum(owners[own] == source)
            assert np.abs(counts - share / sum(shares) * np.arange(1, len(own) + 1)).max() < 3
    for piece in itertools.chain(*pieces):
        stream = rows[np.isin(rows, piece)].tolist()
        for start in range(0, len(stream), len(piece)):
            part = stream[start : start + len(piece)]
            assert len(set(part)) == len(part)


def test_the_rows_are_those_of_the_directories_in_order(directories: list[Path]) -> None:
    mixed = open_packed(directories)
    assert isinstance(mixed, MixedDataset)
    mixed.multiple = 4
    alone = [batch for path in directories for batch in PackedDataset(path, multiple=4)]
    assert len(mixed) == len(alone) == 7
    for row, (found, expected) in enumerate(zip(mixed, alone, strict=True)):
        assert (found.row_id, found.trajectory_ids) == (row, expected.trajectory_ids)
        torch.testing.assert_close(found.input_ids, expected.input_ids)
    assert mixed.total_weight.tolist() == [batch.total_weight for batch in alone]
    assert source_names(mixed) == ["a", "bb"]
    assert [table.num_rows for table in mixed.tables(["row_id"])] == [5, 2]
    with pytest.raises(IndexError):
        mixed[7]


def test_groups_of_two_directories_are_different_groups(directories: list[Path]) -> None:
    objective = choose_objective("grpo", denominator="group")
    mixed = open_packed(directories, terms=True)
    check_columns(mixed, objective)
    table = trajectory_table(mixed, objective)
    assert len(set(table.group.tolist())) == 4  # g0, g1 and g2 of a, g0 of bb
    # Over the rows of one directory the factors are those of this directory alone.
    alone = trajectory_table(open_packed(directories[1], terms=True), objective)
    for one, other in zip(step_factors(table, [5, 6], objective), step_factors(alone, [0, 1], objective), strict=True):
        np.testing.assert_array_equal(one, other)


def test_without_shares_every_row_comes_once_per_epoch(directories: list[Path]) -> None:
    schedule = plan_steps(open_packed(directories), replace(OPTIONS, steps=None, epochs=2))
    for epoch in (0, 1):
        assert sorted(row for step in schedule if step.epoch == epoch for row in step.rows) == [*range(7)]


def test_every_step_has_the_shares_and_a_longer_run_starts_alike(directories: list[Path]) -> None:
    dataset = open_packed(directories)
    schedule = plan_steps(dataset, replace(OPTIONS, mix=(1.0, 1.0), steps=8, rows_per_step=2))
    full = [step for step in schedule if len(step.rows) == 2]
    assert len(full) > 4
    assert all(sum(row < 5 for row in step.rows) == 1 for step in full)
    longer = plan_steps(dataset, replace(OPTIONS, mix=(1.0, 1.0), steps=20, rows_per_step=2))
    assert longer[:8] == schedule


def test_a_row_twice_in_a_step_counts_twice(directories: list[Path], tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "tiny.json")
    options = replace(OPTIONS, mix=(1.0, 3.0), steps=1, lr=0.0)
    run = open_run(directories, config, options)
    (rows,) = [step.rows for step in run.schedule]
    assert len(set(rows)) < len(rows) == 4
    (metrics,) = train(run, tmp_path / "out")
    # The mean over the terms of all rows of the step, from each row alone.
    losses: list[tuple[float, float]] = []
    for row in rows:
        path = write_rows(tmp_path / f"row-{len(losses)}", _trajectories(row), [0])
        (step,) = train(open_run(path, config, replace(options, mix=None)), tmp_path / f"alone-{len(losses)}")
        losses.append((step.loss, step.total_weight))
    total = sum(weight for _, weight in losses)
    assert metrics.total_weight == total
    assert metrics.loss == pytest.approx(sum(loss * weight for loss, weight in losses) / total, rel=1e-6)
    for name in ("a", "bb"):
        own = [each for row, each in zip(rows, losses, strict=True) if (row < 5) is (name == "a")]
        mean = sum(loss * weight for loss, weight in own) / sum(weight for _, weight in own)
        assert metrics.means[f"loss/{name}"] == pytest.approx(mean, rel=1e-6)


def _trajectories(row: int) -> list[Trajectory]:
    return [rollouts("a", 5)[row]] if row < 5 else [rollouts("bb", 2)[row - 5]]


def test_the_command_mixes_and_resumes_bit_for_bit(treepack: Run, directories: list[Path], tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "tiny.json")
    arguments = ["train", *map(str, directories), "--mix", "2,1", "--model", str(config), "--rows-per-step", "2"]
    arguments += ["--min-lr-ratio", "1", "--lr", "0.01"]
    for out, *steps in (("whole", "6"), ("parts", "3", "6")):
        for number in steps:
            done = treepack(*arguments, "--steps", number, "--resume", "--out", str(tmp_path / out))
            assert done.status == 0, done.err
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert one == other
    assert json.loads((tmp_path / "whole" / "run.json").read_text())["packed"] == ", ".join(map(str, directories))


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=6), st.sampled_from([1, 10, 1000]))
@example([1, 1, 6], 10)
def test_options_that_are_made_again_have_the_same_shares(shares: list[int], unit: int) -> None:
    options = replace(OPTIONS, mix=tuple(share / unit for share in shares))
    assert replace(options, steps=9).mix == options.mix  # else the same command would not resume its own run


@pytest.mark.parametrize(
    ("mix", "complaint"),
    [
        ((1.0,), "mix has 1 of 2 shares; give one for each packed directory"),
        ((1.0, 2.0, 3.0), "mix has 3 of 2 shares"),
    ],
)
def test_shares_that_do_not_fit_are_refused(directories: list[Path], mix: tuple[float, ...], complaint: str) -> None:
    with pytest.raises(TreepackError, match=complaint):
        plan_steps(open_packed(directories), replace(OPTIONS, mix=mix))
    for one, other in (((9, 1), (0.9, 0.1)), ((1, 6), (0.1, 0.6)), ((7, 2, 1), (0.7, 0.2, 0.1))):
        assert replace(OPTIONS, mix=one) == replace(OPTIONS, mix=other)  # so one may resume the other
    assert "mix is 1.0, -1.0; expected positive numbers" in refusal(replace, OPTIONS, mix=(1.0, -1.0))


def test_training_steps_are_joined_and_not_taken_in_shares(tmp_path: Path) -> None:
    paths = [
        write_rows(tmp_path / name, [*rollouts(name, 2, step=1), *rollouts(f"{name}-late", 1, step=2)], [0, 1, 2])
        for name in ("a", "bb")
    ]
    dataset = open_packed(paths)
    schedule = plan_steps(dataset, replace(OPTIONS, steps=None))
    assert [{dataset.steps[row] for row in step.rows} for step in schedule] == [{1}, {2}]
    assert [len(step.rows) for step in schedule] == [4, 2]
    assert "cannot be taken in shares; omit --mix" in refusal(plan_steps, dataset, replace(OPTIONS, mix=(1.0, 1.0)))


def test_directories_that_cannot_be_joined_are_refused(tmp_path: Path) -> None:
    tokenizers = [TokenizerEntry(name=name, vocab_size=64, sha256=name * 64) for name in "cd"]
    paths = [
        packed_directory(tmp_path / entry["name"], rollouts("a", 2), capacity=16, tokenizer=entry)
        for entry in tokenizers
    ]
    with pytest.raises(
        TreepackError, match=r"was made with the tokenizer d \(sha256 d+\) and .* with c \(sha256 c+\); build both"
    ):
        open_packed(paths)
    other = write_rows(tmp_path / "other", rollouts("a", 2), [0, 1], normalize="trajectory")
    with pytest.raises(TreepackError, match=r"was packed with --normalize trajectory and .* with --normalize token"):
        open_packed([paths[0], other])
    assert len(open_packed([paths[0], write_rows(tmp_path / "ids", rollouts("a", 2), [0, 1])])) > 2  # no tokenizer
