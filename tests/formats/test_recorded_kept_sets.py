"""Kept sets are read from every form that programs store, each at its token; impossible ones are refused by name."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.command_line import Run
from support.kept import as_lists, token_sets
from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.files.manifest import read_manifest
from treepack.files.schema import PACKED_FORMAT, TRIE_FORMAT
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.token_fields import KEPT_FIELDS
from treepack.ingest.readers.tokens.kept_fields import CUT_NOTE
from treepack.ingest.readers.tokens.token_records import read_tokens
from treepack.pack.check import checked_rows
from treepack.pack.files import read_rows
from treepack.trajectory import Trajectory
from treepack.trie.directory import build_trie_directory
from treepack.trie.store.trie_files import read_trie
from treepack.trie.trie import trajectories_of

SETS = [[5, 9], [], [7, 2, 8]]  # of the response 5 6 7 after a prompt of 2 tokens
EXPECTED = [[5, 9], [], [2, 7, 8]]
FLAT, COUNTS, OFFSETS = [5, 9, 7, 2, 8], [2, 0, 3], [0, 2, 2, 5]
ROWS = [[5, 9, 0], [0, 0, 0], [7, 2, 8]]


def packed(values: list[int]) -> bytes:
    return np.array(values, "<i4").tobytes()


def text(values: list[int]) -> str:
    return base64.b64encode(packed(values)).decode()


FORMS: dict[str, dict[str, Any]] = {
    "lists": {"kept_ids": SETS},
    "vllm": {"sampling_mask": SETS},
    "vllm-object": {"sampling_mask": {"token_ids": SETS}},
    "whole": {"sampling_mask": [[], [3, 4], *SETS]},
    "parquet": {"sampling_mask": np.array([np.array(each, np.int64) for each in SETS], np.object_)},
    "counts": {"sampling_mask": {"ids": FLAT, "counts": COUNTS}},
    "kept-tokens": {"kept_tokens": {"ids": FLAT, "counts": COUNTS}},
    "bytes": {"sampling_mask": {"ids": packed(FLAT), "counts": packed(COUNTS)}},
    "base64": {"sampling_mask": {"ids": text(FLAT), "counts": text(COUNTS)}},
    "offsets": {"sampling_mask": {"token_ids": FLAT, "offsets": OFFSETS}},
    "slime": {"rollout_top_p_token_ids": FLAT, "rollout_top_p_token_offsets": OFFSETS},
    "slime-arrays": {"rollout_top_p_token_ids": np.array(FLAT), "rollout_top_p_token_offsets": np.array(OFFSETS)},
    "nemo-rl": {"sampling_mask_token_ids": ROWS, "sampling_mask_sizes": COUNTS},
}


def read(fields: dict[str, Any], **options: Any) -> Trajectory:
    value = {"prompt_ids": [3, 4], "response_ids": [5, 6, 7], "reward": 1.0, **fields}
    (item,) = read_tokens(Record("f.jsonl:1", "f.jsonl", value), ReadOptions(**options))
    assert isinstance(item, Trajectory)
    return item


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_give_the_same_sets(form: str) -> None:
    item = read(FORMS[form])
    assert token_sets(item) == EXPECTED
    assert not item.metadata
    assert not item.notes


def test_sets_may_belong_to_the_trained_tokens() -> None:
    mask = {"response_mask": [1, 0, 1]}
    assert token_sets(read({**mask, "kept_ids": [[5, 9], [7]]})) == [[5, 9], [7]]
    assert token_sets(read({**mask, "kept_ids": [[5, 9], [], [7]]})) == [[5, 9], [7]]


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"kept_ids": [[5], [9], [7]]}, "kept_ids of trained token 1 lack the sampled id 6"),
        ({"kept_ids": [[5, 5], [], []]}, "kept_ids of trained token 0 repeat the id 5"),
        ({"kept_ids": [[5, -9], [], []]}, "kept_ids hold the id -9"),
        ({"kept_ids": [[5], []]}, "kept_ids has 2 values; expected 5"),
        ({"kept_ids": [5, 6, 7]}, "kept_ids has an entry that is not a list of token ids"),
        ({"kept_ids": [["a"], [], []]}, "kept_ids has an entry that is not a list of token ids"),
        ({"sampling_mask": {"ids": FLAT, "counts": [2, 0, 2]}}, "sampling_mask has 5 ids, which do not fit"),
        ({"sampling_mask": {"ids": FLAT, "offsets": [0, 3, 2, 5]}}, "sampling_mask has 5 ids, which do not fit"),
        ({"sampling_mask": {"ids": "?", "counts": COUNTS}}, "sampling_mask is text that is not base64"),
        ({"sampling_mask": {"ids": [0.5], "counts": [1]}}, "sampling_mask is .*expected a list of ids for each token"),
        ({"rollout_top_p_token_ids": FLAT}, "the sizes of rollout_top_p_token_ids is null"),
        (
            {"sampling_mask_token_ids": ROWS, "sampling_mask_sizes": [4, 0, 3]},
            "sampling_mask_token_ids has sizes that are not 0 to 3",
        ),
    ],
)
def test_impossible_sets_are_refused_with_the_record(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(TreepackError, match=f"f.jsonl:1: {fault}"):
        read(fields)


def test_ids_outside_of_the_vocabulary_are_refused() -> None:
    with pytest.raises(TreepackError, match="kept_ids has the token id 9; expected ids below the vocabulary size 9"):
        read({"kept_ids": SETS}, vocab_size=9)


@pytest.mark.parametrize(
    ("fields", "noted"),
    [
        ({"top_p": 0.9}, True),
        ({"sampling_params": {"top_k": 50}}, True),
        ({"sampling_args": {"min_p": 0.05, "top_p": 1.0}}, True),
        ({"top_p": 1, "top_k": -1, "min_p": None}, False),
        ({"top_p": 0.9, "kept_ids": SETS}, False),
    ],
)
def test_settings_that_cut_the_law_without_sets_are_noted(fields: dict[str, Any], noted: bool) -> None:
    assert (CUT_NOTE in read(fields).notes) == noted


def slime() -> dict[str, Any]:
    return {
        "group_index": 0,
        "index": 3,
        "tokens": [3, 4, 5, 6, 7],
        "response_length": 3,
        "loss_mask": [1, 1, 1],
        "reward": 1.0,
        "status": "completed",
        **FORMS["slime"],
    }


def verifiers() -> dict[str, Any]:
    nodes = [
        {"parent": None, "message": {"role": "user", "content": "x"}, "sampled": False, "token_ids": [3, 4]},
        {
            "parent": 0,
            "message": {"role": "assistant", "content": "y"},
            "sampled": True,
            "token_ids": [5, 6, 7],
            "mask": [1, 1, 1],
            "sampling_mask": {"ids": FLAT, "counts": COUNTS},
        },
    ]
    trace = {"id": "t", "task": {"key": "k"}, "agent": {"name": "agent"}, "nodes": nodes, "rewards": {}}
    return {"id": "e", "env": {"id": "env"}, "task": {"key": "k"}, "group": {"id": "g"}, "traces": [trace]}


def verifiers_results() -> dict[str, Any]:
    tokens = {"prompt_ids": [3, 4], "completion_ids": [5, 6, 7], "completion_mask": [1, 1, 1], "sampling_mask": SETS}
    return {
        "example_id": 1,
        "prompt": "x",
        "completion": "y",
        "reward": 1.0,
        "metrics": {},
        "trajectory": [{"tokens": tokens, "trajectory_id": "t"}],
    }


def prime_rl() -> dict[str, Any]:
    return {
        "input_ids": [3, 4, 5, 6, 7, 3, 4, 5, 6, 7],
        "loss_mask": [False, False, True, True, True] * 2,
        "inference_logprobs": [0.0, 0.0, -1.0, -1.0, -1.0] * 2,
        "advantages": [1.0] * 10,
        "env_names": ["e"] * 10,
        "position_ids": [*range(5), *range(5)],
        "sequence_lengths": [5, 5],
        "sampling_mask": {"ids": FLAT * 2, "counts": [0, 0, *COUNTS] * 2},
    }


def chat() -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "y"},
        "token_ids": [5, 6, 7],
        "sampling_mask": SETS,
        "finish_reason": "stop",
    }
    request = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    return {"request": request, "response": {"id": "r", "choices": [choice], "prompt_token_ids": [3, 4]}}


RECORDS: dict[str, Callable[[], dict[str, Any]]] = {
    each.__name__: each for each in (slime, verifiers, verifiers_results, prime_rl, chat)
}


@pytest.mark.parametrize("name", RECORDS)
def test_formats_keep_the_sets(tmp_path: Path, name: str) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(RECORDS[name]()))
    build_trie_directory([path], tmp_path / "trie")
    items = list(trajectories_of(read_trie(tmp_path / "trie")))
    assert len(items) == (2 if name == "prime_rl" else 1)
    assert [token_sets(item) for item in items] == [EXPECTED] * len(items)
    assert not [note for note in read_manifest(tmp_path / "trie", TRIE_FORMAT)["counts"] if "kept" in note]
    notes = read_manifest(tmp_path / "trie", TRIE_FORMAT)["counts"]
    assert not [note for note in notes if "not used" in note and any(field in note for field in KEPT_FIELDS)]
    assert not any("sampling_mask" in item.metadata for item in items)


def test_a_packed_directory_has_the_sets(treepack: Run, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps({"prompt_ids": [3, 4], "response_ids": [5, 6, 7], "reward": 1.0, "kept_ids": SETS}))
    assert treepack("build-trie", path, "--out", tmp_path / "trie").status == 0
    assert treepack("pack", tmp_path / "trie", "--out", tmp_path / "packed").status == 0
    assert treepack("pack", tmp_path / "trie", "--out", tmp_path / "slices", "--partitions", 2).status == 0
    for name in ("packed", "slices"):
        manifest, trie = read_manifest(tmp_path / name, PACKED_FORMAT), read_trie(tmp_path / "trie")
        (row,) = checked_rows(read_rows(tmp_path / name), manifest, trie)
        assert row.terms is not None
        assert row.terms.kept_ids is not None
        assert as_lists(row.terms.kept_ids) == EXPECTED
