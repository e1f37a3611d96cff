"""The memory that one large record needs: a small multiple of its bytes, from reading it to writing its trie."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from treepack import build_trie_directory
from treepack.files.input_files.number_lists import LARGE, list_fields
from treepack.trie.store.trie_files import read_trie

MEASURE = """
import resource, sys
from treepack import build_trie_directory

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

small, large, out = sys.argv[1:]
build_trie_directory([small], out + "/small")
before = peak()
build_trie_directory([large], out + "/large")
print(peak() - before)
"""


def write_record(path: Path, num_tokens: int) -> int:
    """Write a record of so many token ids, with a mask that trains nine in ten; return its bytes."""
    ids = np.random.default_rng(0).integers(100_000, 150_000, num_tokens).tolist()
    mask = ",".join(["0"] + ["1"] * 9)
    masks = ",".join([mask] * (num_tokens // 10))
    path.write_text(f'{{"id": "a", "input_ids": [{",".join(map(str, ids))}], "loss_mask": [{masks}]}}\n')
    return path.stat().st_size


@pytest.mark.slow
def test_a_record_needs_at_most_four_times_its_size(tmp_path: Path) -> None:
    write_record(tmp_path / "small.jsonl", 100)
    size = write_record(tmp_path / "large.jsonl", 10_000_000)
    command = [sys.executable, "-c", MEASURE, tmp_path / "small.jsonl", tmp_path / "large.jsonl", tmp_path]
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 4 * size


def test_large_and_small_lines_become_the_same_trie(tmp_path: Path) -> None:
    """The ids and spans of a line above the limit of large ones, and of the next lines, are those that were written."""
    num_tokens = LARGE // 4
    write_record(tmp_path / "r.jsonl", num_tokens // 10 * 10)
    text = (tmp_path / "r.jsonl").read_text()
    assert len(text) > LARGE
    small = '{"id": "b", "input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "logprobs": [0.0, -0.5, -0.25]}\n'
    (tmp_path / "r.jsonl").write_text(text + small + text.replace('"a"', '"c"') + small.replace('"b"', '"d"'))
    build_trie_directory([tmp_path / "r.jsonl"], tmp_path / "trie")
    trie = read_trie(tmp_path / "trie")
    ids = np.random.default_rng(0).integers(100_000, 150_000, num_tokens // 10 * 10)
    assert trie.tokens.tolist() == [5, 6, 7, *ids.tolist()]
    table = trie.trajectories
    assert table["trajectory_id"].to_pylist() == ["b", "d", "a", "c"]
    assert [len(spans) for spans in table["trained"].to_pylist()] == [1, 1, len(ids) // 10, len(ids) // 10]
    assert table["sampling_logprobs"].to_pylist() == [[-0.5, -0.25], [-0.5, -0.25], None, None]


def test_fields_with_lists_of_numbers_are_found_in_the_text_of_a_line() -> None:
    line = b'{"input_ids" : [ 5], "id": "a", "mask":[-1.5], "inner": {"x": [1]}, "texts": ["[1"], "empty": []}'
    assert list_fields(line) == ["input_ids", "mask", "x"]
