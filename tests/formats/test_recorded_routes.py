"""Recorded routes are read from every form that programs store, each row at its token."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.command_line import Run
from treepack.errors import TreepackError
from treepack.ingest.options import BuildOptions
from treepack.ingest.readers.tokens.route_fields import read_routes
from treepack.sequences import fill_routes
from treepack.trajectory import Routes, Tokens, Trajectory, is_recorded
from treepack.trie.directory import build_trie_directory
from treepack.trie.store.trie_files import read_trie
from treepack.trie.trie import trajectories_of

ROUTES = np.array([[[3, 1], [0, 2]], [[1, 0], [2, 3]], [[0, 2], [1, 3]], [[2, 3], [0, 1]]])  # of 4 of 5 tokens


def npy(rows: Any) -> str:
    file = io.BytesIO()
    np.save(file, rows.astype(np.int16))
    return base64.b64encode(file.getvalue()).decode()


def npy_text(shape: str) -> str:
    """Base64 of a .npy file without data, whose header has this `shape`."""
    header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return base64.b64encode(b"\x93NUMPY\x01\x00\x76\x00" + header.encode()).decode()


def as_object(rows: Any) -> dict[str, Any]:
    data = base64.b64encode(rows.astype(np.uint8).tobytes()).decode()
    return {"data": data, "shape": list(rows.shape), "dtype": "uint8", "start": 0}


def as_text(rows: Any) -> str:
    shape = "x".join(map(str, rows.shape))
    return f"nrlre1:int16:{shape}:{base64.b64encode(rows.astype('<i2').tobytes()).decode()}"


FORMS: dict[str, Callable[[Any], Any]] = {
    "lists": lambda rows: rows.tolist(),
    "array": lambda rows: rows,
    "parquet": lambda rows: np.array([np.array([*map(np.array, row)], np.object_) for row in rows], np.object_),
    "npy": npy,
    "object": as_object,
    "envelope": as_text,
}


def read(value: Any, *, num_tokens: int = 5, start: int = 0, stored: int | None = None) -> Routes:
    stored = num_tokens if stored is None else stored
    return read_routes(value, source="f:1", name="routed_experts", num_tokens=num_tokens, start=start, stored=stored)


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_have_the_same_routes_and_no_row_for_the_last_token(form: str) -> None:
    routes = read(FORMS[form](ROUTES))
    assert routes.dtype == np.uint8
    assert routes[:4].tolist() == ROUTES.tolist()
    assert (routes[4] == 255).all()


@given(
    rows=st.lists(st.lists(st.integers(-1, 300), min_size=3, max_size=3), min_size=1, max_size=6),
)
def test_an_entry_counts_if_its_experts_are_all_different_and_none_is_negative(rows: list[list[int]]) -> None:
    routes = read([[row] for row in rows], num_tokens=len(rows))
    kind = np.uint8 if max(map(max, rows)) < 256 else np.uint16
    assert routes.dtype == kind
    missing = int(np.iinfo(kind).max)
    for row, got in zip(rows, routes[:, 0].tolist(), strict=True):
        is_known = min(row) >= 0 and len(set(row)) == 3
        assert got == (row if is_known else [missing] * 3)


def test_256_experts_fit_in_a_byte_unless_a_token_has_only_one() -> None:
    rows = [[[255, 7], [0, 255]], [[255, 255], [1, 2]]]
    routes = read(rows, num_tokens=3)
    assert routes.dtype == np.uint8
    assert routes.tolist() == [*rows, [[255, 255], [255, 255]]]
    assert is_recorded(routes).tolist() == [[True, True], [False, True], [False, False]]
    wide = np.zeros((3, 2, 2), np.uint16)
    fill_routes(wide, routes)
    assert wide.tolist() == [rows[0], [[65535] * 2, [1, 2]], [[65535] * 2] * 2]
    assert read([[[255]], [[3]]], num_tokens=2).dtype == np.uint16


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (ROUTES.tolist() * 2, "has 8 rows for 5 tokens"),
        ([[1, 2], [3, 4]], r"has the shape \[2, 2\]"),
        ([[[1], [2]], [[3]]], "has lists of different lengths"),
        ([[[2**70]]], "or an entry that is not an integer"),
        ([[[0.5]]], "of float64"),
        ("AAAA", "is text that is not a .npy file"),
        (npy_text("(99999999999, 2, 2)"), "is text that is not a .npy file"),
        (npy_text("("), "is text that is not a .npy file"),
        ({"data": "", "shape": [[1], 2, 2]}, "do not fit the shape"),
        ("?", "is not base64"),
        ({"data": "AAAA", "shape": [2, 1, 1], "dtype": "int32"}, "3 bytes of int32, which do not fit"),
        ({"data": "AAAA", "shape": [3, 1, 1], "dtype": "nonsense"}, 'has the dtype "nonsense"'),
        ([[[40000]]], "has the expert 40000"),
        ({**as_object(ROUTES), "start": 10**13}, "has the start 10000000000000 for 5 tokens"),
        ({**as_object(ROUTES), "start": -3}, "has the start -3 for 5 tokens"),
        ({**as_object(ROUTES), "start": "2"}, 'has the start "2" for 5 tokens'),
    ],
)
def test_other_values_are_refused_with_the_record(value: Any, message: str) -> None:
    with pytest.raises(TreepackError, match=rf"f:1: routed_experts .*{message}|f:1: routed_experts {message}"):
        read(value)


IDS = [5, 6, 7, 8, 9]
NESTED = ROUTES.tolist()


@pytest.mark.parametrize(("rows", "known"), [([3, 0, 0, 2, 0], 4), ([0, 0, 1, 0, 0], 3), ([0, 0, 0, 0, 0], 0)])
def test_zeros_at_the_end_are_not_recorded_if_a_token_has_one_expert(rows: list[int], known: int) -> None:
    routes = read([[[expert], [expert]] for expert in rows])
    assert routes[:known, :, 0].tolist() == [[expert, expert] for expert in rows[:known]]
    assert (routes[known:] == 255).all()


def test_rows_that_end_before_the_first_trained_token_are_refused() -> None:
    options: dict[str, Any] = {"source": "f:1", "name": "routes", "num_tokens": 5, "start": 0, "stored": 5}
    assert read_routes(NESTED, **options, first_trained=4).shape == (5, 2, 2)
    message = "f:1: routes has 2 rows, and the first trained token is token 4; record a row for each token"
    with pytest.raises(TreepackError, match=message):
        read_routes(NESTED[:2], **options, first_trained=3)


def built(record: dict[str, Any], folder: Path, **options: Any) -> Trajectory:
    path = folder / "rollouts.jsonl"
    path.write_text(json.dumps(record) + "\n")
    build_trie_directory([path], folder / "trie", BuildOptions(**options), overwrite=True)
    (trajectory,) = trajectories_of(read_trie(folder / "trie"))
    return trajectory


# SkyRL fills unrecorded rows up, and marks them.
FILLED = [[0, 1], [0, 1]]
MARKED = {
    "sequences": [[0, *IDS]],
    "attention_mask": [[0, 1, 1, 1, 1, 1]],
    "loss_mask": [[1, 1]],
    "response_mask": [[1, 1]],
    "rollout_expert_indices": [[FILLED, *NESTED, FILLED]],
    "router_padding_mask": [[True, False, False, False, False, True]],
}


def test_rows_that_skyrl_marks_as_filled_are_not_recorded(tmp_path: Path) -> None:
    content = built(MARKED, tmp_path, keep_routes=True).content
    assert isinstance(content, Tokens)
    assert content.routes is not None
    assert content.routes[:4].tolist() == NESTED
    assert (content.routes[4] == 255).all()
    with pytest.raises(TreepackError, match=r"router_padding_mask has 2 values; expected 6"):
        built(MARKED | {"router_padding_mask": [[True, False]]}, tmp_path, keep_routes=True)


@pytest.mark.parametrize("num_rows", [12, 11, 9])
@pytest.mark.parametrize("form", ["object", "lists"])
def test_sequences_of_a_micro_batch_have_their_own_rows(form: str, num_rows: int, tmp_path: Path) -> None:
    # Sequences 5 6 7 8 9 and 6 7 8 9, and three tokens of padding.
    rows = np.random.default_rng(0).permuted(np.tile(np.arange(6), (12, 2, 1)), axis=-1)[:num_rows, :, :2]
    record = {
        "input_ids": [*IDS, *IDS[1:], 0, 0, 0],
        "position_ids": [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2],
        "sequence_lengths": [5, 7],
        "loss_mask": [False, False, True, True, True, False, True, True, True, False, False, False],
        "inference_logprobs": [-1.0] * 12,
        "env_names": ["e"] * 12,
        "routed_experts": FORMS[form](rows),
    }
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(record) + "\n")
    build_trie_directory([path], tmp_path / "trie", BuildOptions(keep_routes=True))
    contents = [item.content for item in trajectories_of(read_trie(tmp_path / "trie"))]
    assert sorted(len(content.tokens) for content in contents if isinstance(content, Tokens)) == [4, 5]
    for content in contents:
        assert isinstance(content, Tokens)
        assert content.routes is not None
        length = len(content.tokens)
        begin = {5: 0, 4: 5}[length]
        assert content.routes[: length - 1].tolist() == rows[begin : begin + length - 1].tolist()


def test_rollouts_without_any_routes_are_counted(treepack: Run, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    record = {"input_ids": IDS, "loss_mask": [0, 0, 0, 1, 1], "group_id": "g"}
    lines = [record | {"routed_experts": NESTED}, record, record | {"routed_experts": [[[-1, -1]] * 2] * 4}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = treepack("build-trie", path, "--out", tmp_path / "trie", "--keep-routes")
    text = " ".join(done.out.split())
    assert "recorded for 4 tokens, " in text
    assert ", and for no token of 2 trajectories, which share no token with others;" in text
    path.write_text(json.dumps(lines[2]) + "\n")
    done = treepack("build-trie", path, "--out", tmp_path / "none", "--keep-routes")
    assert (done.status, "no rollout has recorded routes" in done.err) == (1, True)


def test_experts_beyond_the_type_are_refused_in_batches_too(tmp_path: Path) -> None:
    rows = [[[[2**32, 1], [0, 1]]] * 6]
    with pytest.raises(TreepackError, match="has the expert 4294967296; expected at most 32767"):
        built(MARKED | {"rollout_expert_indices": rows}, tmp_path, keep_routes=True)


# Two calls, whose second prompt continues the first one: the first call has computed tokens 0 and 1, and the second has
# other experts for token 0.
FIRST, SECOND = ROUTES[:2].tolist(), [ROUTES[3].tolist(), *ROUTES[1:].tolist()]
CALLS: dict[str, dict[str, Any]] = {
    "skyrl": {
        "prompt_token_ids": [IDS[:2], IDS[:4]],
        "response_ids": [IDS[2:3], IDS[4:]],
        "loss_masks": [[1], [1]],
        "rewards": [0.0, 1.0],
        "is_last_step": [False, True],
        "rollout_expert_indices": [FIRST, SECOND],
    },
    "verifiers-results": {
        "example_id": 1,
        "prompt": "a",
        "completion": "b",
        "reward": 1.0,
        "trajectory": [
            {
                "tokens": {
                    "prompt_ids": IDS[:split],
                    "completion_ids": IDS[split:end],
                    "completion_mask": [1] * (end - split),
                    "routed_experts": routes,
                }
            }
            for split, end, routes in ((2, 3, FIRST), (4, 5, as_object(ROUTES[2:]) | {"start": 2}))
        ],
    },
    "nemo-gym": {
        "responses_create_params": {"input": [{"role": "user", "content": "a"}]},
        "reward": 1.0,
        "response": {
            "output": [
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "x", "annotations": []}],
                    "prompt_token_ids": IDS[:split],
                    "generation_token_ids": IDS[split:end],
                    "generation_log_probs": [-1.0] * (end - split),
                    "routed_experts": routes,
                }
                for split, end, routes in ((2, 3, as_text(ROUTES[:2])), (4, 5, npy(np.array(SECOND))))
            ]
        },
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_of_joined_calls_the_first_one_with_routes_for_a_token_counts(name: str, tmp_path: Path) -> None:
    content = built(CALLS[name], tmp_path, keep_routes=True).content
    assert isinstance(content, Tokens)
    assert content.tokens.tolist() == IDS
    assert content.routes is not None
    assert content.routes[:4].tolist() == ROUTES.tolist()
    assert (content.routes[4] == 255).all()
    plain = built(CALLS[name], tmp_path).content
    assert isinstance(plain, Tokens)
    assert plain.routes is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"route_conflicts": "first"}, "is about kept routes"),
        ({"keep_routes": True, "route_conflicts": "last"}, "expected one of split, first"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TreepackError, match=message):
        BuildOptions(**options)
