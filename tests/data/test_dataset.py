"""Rows on disk come back as tensors, in any order and padded, and errors about damaged files name the file."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor
from torch.utils.data import DataLoader

from support import strategies
from support.oracle_model import packed_directory, write_rows
from support.refusal import refusal
from support.strategies import make
from treepack.attention import visible_pairs
from treepack.data import dataset as dataset_module
from treepack.data.batch import Batch
from treepack.data.dataset import PackedDataset
from treepack.errors import TreepackError
from treepack.files import parts
from treepack.objectives.losses import objective_loss
from treepack.objectives.objective import choose_objective
from treepack.pack import files as packed_files
from treepack.pack.files import read_rows, row_of_table
from treepack.train.options import TrainOptions
from treepack.train.schedule import plan_steps
from treepack.trajectory import Trajectory

COLUMNS = ("input_ids", "position_ids", "parent", "subtree_end", "scale", "loss_weight", "trajectory_ends")


def forest(count: int, *, length: int = 30) -> list[Trajectory]:
    generator = np.random.default_rng(0)
    # Trajectory i starts with token i, so there is one tree per trajectory; three of them share a training step.
    return [make(f"t{i}", [i, *generator.integers(0, 50, length).tolist()], step=i // 3) for i in range(count)]


def are_equal(a: Batch, b: Batch) -> bool:
    pairs = [(getattr(a, name), getattr(b, name)) for name in a.__dataclass_fields__]
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(samples=strategies.trajectories())
def test_batches_are_the_rows_that_were_written(tmp_path: Path, samples: list[Trajectory]) -> None:
    path = packed_directory(tmp_path / "packed", samples, capacity=20)
    dataset, rows = PackedDataset(path), list(read_rows(path))
    assert len(dataset) == len(rows) > 0
    for i in reversed(range(len(rows))):  # not in file order
        batch, row = dataset[i], rows[i]
        for name in COLUMNS:
            assert getattr(batch, name).tolist() == getattr(row, name).tolist()
        assert (batch.row_id, batch.step, batch.trajectory_ids) == (row.row_id, row.step, tuple(row.trajectory_ids))
        assert batch.num_tokens == row.num_tokens == dataset.num_tokens[i]
        assert batch.total_weight == pytest.approx(dataset.total_weight[i], rel=1e-12)
        assert (dataset.row_ids[i], dataset.steps[i]) == (row.row_id, row.step)
    lengths = [len(t.content.tokens) for t in samples]  # type: ignore[union-attr]
    assert sum(dataset[i].tokens_flat for i in range(len(rows))) == sum(lengths)
    assert dataset.max_position() == max(lengths) - 1


def test_rows_include_their_terms_on_request(tmp_path: Path) -> None:
    samples = [
        make("a", [1, 2, 3], group="x", reward=1.0, advantage=0.5, old_logprobs=[-1.0, -2.0]),
        make("b", [1, 2, 4, 5], spans=[(1, 2, 1.0), (3, 4, 2.0)], group="y", advantages=[3.0, 4.0]),
    ]
    path = packed_directory(tmp_path / "packed", samples, capacity=20)
    assert PackedDataset(path)[0].terms is None
    dataset = PackedDataset(path, terms=True, multiple=16)
    terms = dataset[0].terms
    assert terms is not None
    assert "term_ref_logprob" not in dataset.term_columns
    # Row: 1 2 3 | 4 5, with 1 2 shared. Trajectory a trains the row indices 1 and 2, trajectory b trains 1 and 4.
    assert terms.tokens.tolist() == [1, 2, 4]
    assert terms.tokens[terms.index].tolist() == [1, 2, 1, 4]
    assert (terms.trajectory.tolist(), terms.weight.tolist()) == ([0, 0, 1, 1], [1, 1, 1, 2])
    assert (terms.ref_logprob, terms.group.tolist()) == (None, [0, 1])
    assert terms.advantage is not None
    assert terms.advantage.tolist() == [0.5, 0.5, 3, 4]
    assert terms.old_logprob is not None
    assert terms.old_logprob.nan_to_num(9).tolist() == [-1, -2, 9, 9]
    assert terms.reward is not None
    assert terms.reward.nan_to_num(9).tolist() == [1, 9]


def test_rows_of_an_older_treepack_are_refused(tmp_path: Path) -> None:
    path = packed_directory(tmp_path / "packed", forest(3), capacity=40)
    row = pq.read_table(path / "part-00000.parquet").drop_columns("trajectory_groups")
    assert "no column trajectory_groups, so an older treepack wrote them; pack" in refusal(row_of_table, row, 0)


def test_padding_sees_only_itself_and_counts_for_nothing(tmp_path: Path) -> None:
    path = packed_directory(tmp_path / "packed", forest(4, length=20), capacity=50)
    plain, padded = PackedDataset(path), PackedDataset(path, multiple=64)
    for i in range(len(plain)):
        short, long = plain[i], padded[i]
        length = short.num_tokens
        assert len(long.input_ids) == 64 > length
        assert (long.num_tokens, long.total_weight, long.tokens_flat) == (length, short.total_weight, short.tokens_flat)
        for name in COLUMNS[:-1]:
            assert torch.equal(getattr(long, name)[:length], getattr(short, name))
        seen = visible_pairs(long.subtree_end[None])[0]
        assert torch.equal(seen[length:, length:], torch.eye(64 - length, dtype=torch.bool))
        assert not seen[length:, :length].any()
        assert not seen[:length, length:].any()
        assert (long.parent[length:] == -1).all()
        assert not long.loss_weight[length:].any()


def test_rows_are_read_by_group_and_few_groups_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Sizes so small that 24 rows of 31 tokens fill several parts, and the cache holds only some of the row groups.
    monkeypatch.setattr(dataset_module, "CACHED_BYTES", 8000)
    monkeypatch.setattr(packed_files, "GROUP_TOKENS", 40)
    monkeypatch.setattr(parts, "PART_TOKENS", 200)
    path = packed_directory(tmp_path / "packed", forest(24), capacity=40)
    dataset, rows = PackedDataset(path), list(read_rows(path))
    assert len(dataset.manifest["files"]) > 2
    for i in np.random.default_rng(0).permutation(len(rows)).tolist():
        assert dataset[i].input_ids.tolist() == rows[i].input_ids.tolist()
    assert 1 < len(dataset._cache) < len(rows) // 2  # some groups are cached, and most have been dropped
    assert sum(table.nbytes for table in dataset._cache.values()) == dataset._cached_bytes <= 8000


def test_a_worker_process_may_hold_a_copy(tmp_path: Path) -> None:
    dataset = PackedDataset(packed_directory(tmp_path / "packed", forest(3), capacity=40))
    first = dataset[0]
    copy = pickle.loads(pickle.dumps(dataset))
    assert are_equal(copy[0], first)


def test_the_rows_end_where_the_directory_ends(tmp_path: Path) -> None:
    dataset = PackedDataset(packed_directory(tmp_path / "packed", forest(3), capacity=40))
    with pytest.raises(IndexError):
        dataset[len(dataset)]
    assert len(list(dataset)) == len(dataset)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Seven rows of the training steps 0, 0, 0, 1, 1, 1, 2."""
    trajectories = [make(f"t{i}", [i, *range(10, 30)], step=i // 3) for i in range(7)]
    return write_rows(tmp_path / "seven", trajectories, range(7))


def ids(batches: Iterable[Batch]) -> list[int]:
    return [batch.row_id for batch in batches]


def test_an_epoch_has_the_order_of_the_files_or_of_the_trainer(packed: Path) -> None:
    dataset = PackedDataset(packed)
    assert dataset.steps == [0, 0, 0, 1, 1, 1, 2]
    assert ids(dataset) == ids(dataset) == list(range(7))
    options = TrainOptions(epochs=3, seed=5, rows_per_step=1)
    rows = [row for step in plan_steps(dataset, options) for row in step.rows]
    shuffled = PackedDataset(packed, shuffle=True, seed=5)
    epochs = [ids(shuffled) for _ in range(3)]
    assert [row for epoch in epochs for row in epoch] == rows
    assert [sorted(epoch) for epoch in epochs] == [list(range(7))] * 3
    assert len({tuple(epoch) for epoch in epochs}) > 1  # epochs differ from each other
    assert shuffled.epoch == 3


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_ranks_share_the_rows_of_each_training_step_in_equal_numbers(packed: Path, shuffle: bool, world: int) -> None:
    ranks = [PackedDataset(packed, shuffle=shuffle, rank=rank, world=world, multiple=8) for rank in range(world)]
    rounds = list(zip(*(list(rank) for rank in ranks), strict=True))
    rows = [batch for together in rounds for batch in together if batch.num_tokens]
    assert ids(rows) == ids(PackedDataset(packed, shuffle=shuffle))
    assert all(len({batch.step for batch in together if batch.num_tokens}) == 1 for together in rounds)
    padding = [batch for together in rounds for batch in together if not batch.num_tokens]
    assert len(padding) == sum(-count % world for count in (3, 3, 1)) > 0  # world 2: 1 + 1 + 1
    for batch in padding:
        assert (batch.total_weight, float(batch.loss_weight.sum()), len(batch.input_ids)) == (0.0, 0.0, 16)
        assert torch.equal(visible_pairs(batch.subtree_end[None])[0], torch.eye(16, dtype=torch.bool))


@pytest.mark.parametrize("world", [1, 2])
def test_a_state_continues_with_exactly_the_remaining_rows(packed: Path, world: int) -> None:
    def open_ranks(seed: int) -> list[PackedDataset]:
        return [PackedDataset(packed, shuffle=True, seed=seed, rank=rank, world=world) for rank in range(world)]

    # Two epochs of each rank; then a state after every number of rows, also at and across the end of an epoch.
    expected = [[same_rows for _ in range(2) for same_rows in ids(each)] for each in open_ranks(3)]
    for cut in range(len(expected[0]) + 1):
        for before, after, rows in zip(open_ranks(3), open_ranks(0), expected, strict=True):
            first = ids(islice(chain(before, before), cut))
            after.load_state_dict(json.loads(json.dumps(before.state_dict())))
            rest = []
            while after.epoch < 2:
                rest += ids(after)
            assert first + rest == rows


def test_a_second_iteration_continues_where_the_first_stopped(packed: Path) -> None:
    dataset = PackedDataset(packed)
    first = iter(dataset)
    assert (next(first).row_id, next(first).row_id) == (0, 1)
    assert ids(islice(dataset, 3)) == [2, 3, 4]
    assert ids(first) == [5, 6]  # both iterators share one position
    assert (dataset.epoch, ids(dataset)) == (1, list(range(7)))
    assert dataset[3].row_id == 3


def test_an_unreadable_row_does_not_advance_the_position(packed: Path) -> None:
    dataset = PackedDataset(packed)
    part = packed / "part-00000.parquet"
    whole = part.read_bytes()
    part.write_bytes(b"\0" * len(whole))  # damage after the check at opening
    assert "row group 0 cannot be read" in refusal(next, iter(dataset))
    part.write_bytes(whole)
    assert ids(dataset) == list(range(7))


def test_a_state_of_another_dataset_is_refused(packed: Path, tmp_path: Path) -> None:
    other = PackedDataset(packed_directory(tmp_path / "other", forest(3), capacity=40))
    assert "belongs to a dataset with another manifest" in refusal(
        other.load_state_dict, PackedDataset(packed).state_dict()
    )
    for state in ({}, {**other.state_dict(), "position": None}):
        assert "pass the result of state_dict()" in refusal(other.load_state_dict, state)


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 1), (0, 0)])
def test_a_rank_that_does_not_exist_is_refused(packed: Path, rank: int, world: int) -> None:
    assert "expected a rank from 0" in refusal(PackedDataset, packed, rank=rank, world=world)


def test_padding_has_the_terms_of_no_trajectory(tmp_path: Path) -> None:
    samples = [make(name, [1, 2, 3], advantage=1.0, group=name) for name in "abc"]
    path = write_rows(tmp_path / "packed", samples, range(3))
    last = list(PackedDataset(path, terms=True, rank=1, world=2))[-1]
    assert (last.num_tokens, last.terms is None) == (0, False)
    assert last.terms is not None
    objective = choose_objective("grpo", kl=0.1)
    attached = torch.zeros(0, requires_grad=True)
    loss, sums = objective_loss(attached, attached, last.terms, torch.zeros(0, dtype=torch.float64), objective)
    assert (float(loss.detach()), loss.requires_grad, float(sums["weight"])) == (0.0, True, 0.0)


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_takes_it_as_it_is(packed: Path, workers: int, context: str) -> None:
    dataset = PackedDataset(packed, multiple=8)
    expected = [dataset[i] for i in range(7)]
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": context if workers else None}
    batches = list(DataLoader(dataset, batch_size=None, **options))
    assert all(are_equal(a, b) for a, b in zip(batches, expected, strict=True))
    # The loader uses a sampler and __getitem__, so the position of iteration has not moved.
    assert (dataset.epoch, ids(dataset)) == (0, list(range(7)))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    """Change eight bytes in the middle of the data of a column; size and footer stay the same."""
    column = pq.ParquetFile(path).metadata.row_group(0).column(5)
    data = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    middle = start + column.total_compressed_size // 2
    data[middle : middle + 8] = bytes(255 - byte for byte in data[middle : middle + 8])
    path.write_bytes(bytes(data))


def overwrite_footer(path: Path) -> None:
    data = path.read_bytes()
    # A Parquet file ends with: footer, its length in 4 bytes, the magic bytes PAR1.
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    path.write_bytes(data[:start] + b"\xff" * 64 + data[start + 64 :])


@pytest.mark.parametrize("damage", [Path.unlink, truncate, flip, overwrite_footer])
def test_damage_is_one_sentence_that_names_the_file(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = packed_directory(tmp_path / "packed", forest(12, length=200), capacity=300)
    damage(path / "part-00000.parquet")
    with pytest.raises(TreepackError, match=r"part-00000\.parquet") as caught:
        list(PackedDataset(path))
    assert "\n" not in str(caught.value)


def test_an_unfinished_or_other_directory_is_refused(tmp_path: Path) -> None:
    path = packed_directory(tmp_path / "packed", forest(3), capacity=40)
    (path / "manifest.json").unlink()
    assert "manifest.json" in refusal(PackedDataset, path)
