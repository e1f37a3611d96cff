"""Rows on disk come back as tensors, in any order, padded; damage is named."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import strategies
import torch
from hypothesis import HealthCheck, given, settings
from oracle_model import packed_directory
from strategies import make
from torch import Tensor

from treepack import shards
from treepack.attention import visible_pairs
from treepack.batch import Batch
from treepack.dataset import PackedDataset
from treepack.errors import TreepackError
from treepack.trajectory import Trajectory

COLUMNS = ("input_ids", "position_ids", "parent", "subtree_end", "scale", "loss_weight", "trajectory_ends")


def forest(count: int, *, length: int = 30) -> list[Trajectory]:
    generator = np.random.default_rng(0)
    return [make(f"t{i}", [i, *generator.integers(0, 50, length).tolist()], step=i // 3) for i in range(count)]


def same(a: Batch, b: Batch) -> bool:
    pairs = [(getattr(a, name), getattr(b, name)) for name in a.__dataclass_fields__]
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(given_ones=strategies.trajectories())
def test_batches_are_the_rows_that_were_written(tmp_path: Path, given_ones: list[Trajectory]) -> None:
    path = packed_directory(tmp_path / "packed", given_ones, capacity=20)
    dataset, rows = PackedDataset(path), list(shards.read_rows(path))
    assert len(dataset) == len(rows) > 0
    for i in reversed(range(len(rows))):
        batch, row = dataset[i], rows[i]
        for name in COLUMNS:
            assert getattr(batch, name).tolist() == getattr(row, name).tolist()
        assert (batch.row_id, batch.step, batch.trajectory_ids) == (row.row_id, row.step, tuple(row.trajectory_ids))
        assert batch.num_tokens == row.num_tokens == dataset.num_tokens[i]
        assert batch.total_weight == pytest.approx(dataset.total_weight[i], rel=1e-12)
        assert (dataset.row_ids[i], dataset.steps[i]) == (row.row_id, row.step)
    lengths = [len(t.content.tokens) for t in given_ones]  # type: ignore[union-attr]
    assert sum(dataset[i].tokens_flat for i in range(len(rows))) == sum(lengths)
    assert dataset.max_position() == max(lengths) - 1


def test_terms_come_with_the_rows_when_asked(tmp_path: Path) -> None:
    given_ones = [
        make("a", [1, 2, 3], group="x", reward=1.0, advantage=0.5, old_logprobs=[-1.0, -2.0]),
        make("b", [1, 2, 4, 5], spans=[(1, 2, 1.0), (3, 4, 2.0)], group="y", advantages=[3.0, 4.0]),
    ]
    path = packed_directory(tmp_path / "packed", given_ones, capacity=20)
    assert PackedDataset(path)[0].terms is None
    dataset = PackedDataset(path, terms=True, multiple=16)
    terms = dataset[0].terms
    assert terms is not None
    assert "term_ref_logprob" not in dataset.term_columns
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
    with pytest.raises(TreepackError, match="no column trajectory_groups, so an older treepack wrote them; pack"):
        shards.row_of_table(row, 0)


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
    monkeypatch.setattr(shards, "GROUP_TOKENS", 40)
    monkeypatch.setattr(shards, "PART_TOKENS", 200)
    path = packed_directory(tmp_path / "packed", forest(24), capacity=40)
    dataset, rows = PackedDataset(path), list(shards.read_rows(path))
    assert len(dataset.manifest["files"]) > 2
    for i in np.random.default_rng(0).permutation(len(rows)).tolist():
        assert dataset[i].input_ids.tolist() == rows[i].input_ids.tolist()
    assert len(dataset._cache) < len(rows) // 2


def test_a_worker_process_may_hold_a_copy(tmp_path: Path) -> None:
    dataset = PackedDataset(packed_directory(tmp_path / "packed", forest(3), capacity=40))
    first = dataset[0]
    copy = pickle.loads(pickle.dumps(dataset))
    assert same(copy[0], first)


def test_the_rows_end_where_the_directory_ends(tmp_path: Path) -> None:
    dataset = PackedDataset(packed_directory(tmp_path / "packed", forest(3), capacity=40))
    with pytest.raises(IndexError):
        dataset[len(dataset)]
    assert len(list(dataset)) == len(dataset)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    """Change bytes in the middle of the largest column, which leaves size and footer as they were."""
    column = pq.ParquetFile(path).metadata.row_group(0).column(5)
    data = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    middle = start + column.total_compressed_size // 2
    data[middle : middle + 8] = bytes(255 - byte for byte in data[middle : middle + 8])
    path.write_bytes(bytes(data))


def overwrite_footer(path: Path) -> None:
    data = path.read_bytes()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    path.write_bytes(data[:start] + b"\xff" * 64 + data[start + 64 :])


@pytest.mark.parametrize("damage", [Path.unlink, truncate, flip, overwrite_footer])
def test_damage_is_one_sentence_that_names_the_file(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = packed_directory(tmp_path / "packed", forest(12, length=200), capacity=300)
    damage(path / "part-00000.parquet")
    with pytest.raises(TreepackError, match=r"part-00000\.parquet") as caught:
        list(PackedDataset(path))
    assert "\n" not in str(caught.value)


def test_one_flipped_bit_anywhere_is_found_at_opening(tmp_path: Path) -> None:
    path = packed_directory(tmp_path / "packed", forest(3), capacity=40)
    part = path / "part-00000.parquet"
    whole = part.read_bytes()
    for at in range(0, len(whole), len(whole) // 10):
        part.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(TreepackError, match="altered"):
            PackedDataset(path)


def test_an_unfinished_or_other_directory_is_refused(tmp_path: Path) -> None:
    path = packed_directory(tmp_path / "packed", forest(3), capacity=40)
    (path / "manifest.json").unlink()
    with pytest.raises(TreepackError, match=r"manifest\.json"):
        PackedDataset(path)
