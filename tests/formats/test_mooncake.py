"""Traces of lengths and block hashes: the sharing of their placeholder tokens, and the commands that refuse them."""

from __future__ import annotations

import json
from itertools import combinations, takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.command_line import Run
from support.read_rollouts import read_trajectories
from support.readings import only
from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.formats.model_calls import mooncake
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.trajectory import Skipped, Tokens

LENGTHS_ONLY = ReadOptions(shapes=True)


def read(number: int, value: dict[str, Any]) -> Tokens:
    trajectory = only(mooncake.read_mooncake(Record(f"t.jsonl:{number}", "t.jsonl", value), LENGTHS_ONLY))
    assert isinstance(trajectory.content, Tokens)
    return trajectory.content


def request(num_input: int, num_output: int, hashes: list[int]) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": num_input, "output_length": num_output, "hash_ids": hashes}


def num_common(one: Any, other: Any) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@st.composite
def traces(draw: st.DrawFn) -> tuple[int, list[dict[str, Any]]]:
    """Requests of one block size whose blocks come from a small tree, so that they share and part."""
    size = draw(st.sampled_from([16, 512]))
    requests = []
    for _ in range(draw(st.integers(2, 5))):
        path = draw(st.lists(st.integers(0, 1), min_size=1, max_size=4))
        hashes = [int("1" + "".join(map(str, path[: depth + 1])), 2) for depth in range(len(path))]
        last = size if size == 16 else draw(st.sampled_from([1, 300, 512]))
        requests.append(request((len(path) - 1) * size + last, draw(st.integers(1, 9)), hashes))
    return size, requests


@given(traces())
def test_requests_share_the_blocks_whose_hashes_are_equal_and_nothing_else(
    trace: tuple[int, list[dict[str, Any]]],
) -> None:
    size, requests = trace
    sequences = [read(number, value).tokens for number, value in enumerate(requests, 1)]
    for one, other in combinations(range(len(requests)), 2):
        a, b = requests[one], requests[other]
        blocks = num_common(a["hash_ids"], b["hash_ids"])
        expected = min(blocks * size, a["input_length"], b["input_length"])
        assert num_common(sequences[one], sequences[other]) == expected


def test_a_request_without_output_is_skipped() -> None:
    record = Record("t.jsonl:1", "t.jsonl", request(40, 0, [9]))
    assert list(mooncake.read_mooncake(record, LENGTHS_ONLY)) == [Skipped("t.jsonl:1", "request without output")]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (request(1100, 5, [1]), "has 1 hash_ids for 1100 tokens of input; expected one for every 512 or 16 tokens"),
        (request(-1, 5, []), "input_length is -1; expected the number of tokens, at most 16777216"),
        (request(5, 5, [2**30]), "hash_ids has the id 1073741824; number the blocks from 0 to 1073741823"),
    ],
)
def test_what_contradicts_itself_is_refused(value: dict[str, Any], said: str) -> None:
    with pytest.raises(TreepackError) as caught:
        read(1, value)
    assert str(caught.value) == f"t.jsonl:1: {said}"


def test_stats_counts_a_trace_and_build_trie_refuses_it(treepack: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = [request(1100, 52, [46, 47, 48]), request(1100, 8, [46, 47, 48])]
    path.write_text("".join(json.dumps(value) + "\n" for value in trace))
    counted = json.loads(treepack("stats", path, "--json").out)
    assert (counted["tokens_flat"], counted["tokens_tree"]) == (2260, 1160)
    refused = treepack("build-trie", path, "--out", tmp_path / "trie")
    assert refused.status == 1
    assert "trace.jsonl:1: has the lengths of a request, not its tokens; only treepack stats reads it" in refused.err
    with pytest.raises(TreepackError, match="only treepack stats reads it"):
        list(read_trajectories([path]))
