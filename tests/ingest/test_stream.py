"""Reading in several processes: the same columns, counts, hashes and errors as in one process, for any input."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.byte_tokenizer import PLAIN, save
from treepack.errors import TreepackError
from treepack.files.input_files.inputs import InputHash
from treepack.ingest import stream
from treepack.ingest.options import BuildOptions
from treepack.ingest.read_log import ReadLog
from treepack.ingest.stream import ColumnsWork, Part, min_bytes, num_bytes, parts_and_job, read, usable
from treepack.processes import ProcessTeam
from treepack.sequences import Sequences, join

Rollouts = list[dict[str, Any]]
WORKERS = [1, pytest.param(2, marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def small_inputs_have_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MIN_BYTES", 1)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("tokenizer"), PLAIN)


def token_rollouts(count: int, length: int = 400) -> Rollouts:
    # With `id % 7 == 0` nothing is trained, so every seventh rollout is skipped.
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50, (count, length)).tolist()
    masks = [[0] * 10 + [int(i % 7 > 0)] * (length - 10) for i in range(count)]
    return [{"id": i, "input_ids": ids[i], "loss_mask": masks[i], "reward": i / 2} for i in range(count)]


def chats(count: int) -> Rollouts:
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}] * 3
    return [
        {"id": str(i), "messages": [{"role": "user", "content": f"{i % 5}"}, turns[1], *turns]} for i in range(count)
    ]


def jsonl(rollouts: Rollouts) -> bytes:
    return b"".join(json.dumps(rollout).encode() + b"\n" for rollout in rollouts)


def write(folder: Path, name: str, data: bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def parquet(rollouts: Rollouts) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rollouts), sink, row_group_size=64)
    return sink.getvalue()


def columns(inputs: Sequence[str], options: BuildOptions) -> tuple[Sequences, ReadLog, InputHash]:
    """The sequences that `TrieBuilder` collects, in the order of arrival."""
    log, digest, batches = ReadLog(), InputHash(), list[Sequences]()
    parts, job = parts_and_job(inputs, options, None, digest, as_ranges=options.workers > 1)
    with ProcessTeam(ColumnsWork, [job] * options.workers) as team:
        for results in team.in_order(read_part, parts, min_size=min_bytes(job), size=num_bytes):
            for batch, log_of_part in results:
                log.merge(log_of_part)
                batches += [] if batch is None else [batch]
    return join(batches), log, digest


def read_part(work: ColumnsWork, part: Part) -> list[tuple[Sequences | None, ReadLog]]:
    return [work(each) for each in part.parts()]


def same(a: Sequences, b: Sequences) -> bool:
    return np.array_equal(a.tokens, b.tokens) and np.array_equal(a.offsets, b.offsets) and a.table.equals(b.table)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of file, with files and rollouts that are skipped or noted."""
    made = tmp_path_factory.mktemp("inputs")
    tokens = token_rollouts(300)
    write(made, "a/plain.jsonl", b"\n" + jsonl(tokens))
    write(made, "a/small.jsonl", jsonl(tokens[:1]))
    write(made, "b.jsonl.gz", gzip.compress(jsonl(tokens)))
    write(made, "c.json", json.dumps(tokens[:50]).encode())
    write(made, "d.json", json.dumps(tokens[0], indent=1).encode())
    write(made, "e.parquet", parquet(tokens))
    write(made, "f.jsonl", jsonl(chats(80)))
    write(made, "notes.md", b"not read")
    write(made, "unknown.json", b'{"what": 1}')
    return made


@pytest.mark.slow
def test_several_workers_read_what_one_reads(folder: Path, tokenizer: str) -> None:
    for expand in ("trajectory", "turns"):
        one, log, digest = columns([str(folder)], BuildOptions(tokenizer=tokenizer, expand=expand))
        many, log_of_many, digest_of_many = columns(
            [str(folder)], BuildOptions(tokenizer=tokenizer, expand=expand, workers=3)
        )
        assert same(one, many)
        assert log == log_of_many
        assert sorted(digest.files) == sorted(digest_of_many.files)
        assert len(one.offsets) > 800
        assert len(log.counts) >= 3
        assert len(log.skipped) == 100 < log.num_skipped
        assert digest.num_files == 7


def test_columns_are_those_of_the_trajectories(folder: Path, tokenizer: str) -> None:
    options, counts = BuildOptions(tokenizer=tokenizer), Counter[str]()
    rollouts = list(usable(read([str(folder)], options), counts))
    sequences, log, _ = columns([str(folder)], options)
    assert sequences.table["trajectory_id"].to_pylist() == [rollout.trajectory_id for rollout in rollouts]
    assert sequences.table["source"].to_pylist() == [rollout.source for rollout in rollouts]
    assert counts == log.counts


@pytest.mark.parametrize("workers", WORKERS)
def test_the_hash_is_that_of_the_files(folder: Path, tokenizer: str, workers: int) -> None:
    _, _, digest = columns([str(folder)], BuildOptions(tokenizer=tokenizer, workers=workers))
    assert len(digest.files) == 7
    for path, sha256 in digest.files:
        assert hashlib.sha256(Path(path).read_bytes()).hexdigest() == sha256


@pytest.mark.parametrize("workers", WORKERS)
def test_errors_name_file_and_line(tmp_path: Path, workers: int) -> None:
    lines = jsonl(token_rollouts(900)).splitlines(keepends=True)
    # Line 851 is not even JSON, but the error must name the first bad line.
    lines[800] = b'{"input_ids": [1, 2], "loss_mask": [1, 1, 1]}\n'
    lines[850] = b"{broken\n"
    write(tmp_path, "r.jsonl", b"".join(lines))
    path = str(tmp_path / "r.jsonl")
    with pytest.raises(TreepackError) as caught:
        columns([path, str(tmp_path / "missing")], BuildOptions(workers=workers))
    assert "missing: no such file" in str(caught.value)
    with pytest.raises(TreepackError) as caught:
        columns([path], BuildOptions(workers=workers))
    assert str(caught.value).startswith(f"{path}:801: loss_mask has 3 values for 2 tokens")


def test_text_without_a_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    write(tmp_path, "r.jsonl", jsonl(chats(3)))
    with pytest.raises(TreepackError, match=r"r.jsonl:1: contains text, not token ids; give --tokenizer NAME"):
        columns([str(tmp_path)], BuildOptions())


@pytest.mark.slow
def test_standard_input_is_shared_among_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    data = jsonl(token_rollouts(1500))
    results = []
    for workers in (1, 2):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(data))))
        results.append(columns(["-"], BuildOptions(workers=workers))[0])
    assert same(*results)
    assert len(results[0].offsets) > 1200


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_build_leaves_no_output_and_its_repetition_the_same_files(
    tmp_path: Path, tokenizer: str, how: signal.Signals
) -> None:
    """It is interrupted while it reads, once its workers run; standard input ends only then."""
    data = jsonl(chats(1500))
    write(tmp_path, "r.jsonl", data)
    build = [str(Path(sys.executable).parent / "treepack"), "build-trie", "--tokenizer", tokenizer, "--out"]
    command = [*build, str(tmp_path / "out" / "trie"), "--workers", "2"]
    process = subprocess.Popen(
        [*command, "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(data)
    process.stdin.flush()
    workers: list[int] = []
    while len(workers) < 2:
        time.sleep(0.05)
        assert process.poll() is None
        workers = workers_of(process.pid)
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    assert b"Traceback" not in err
    assert process.returncode == (1 if how == signal.SIGINT else -how)
    for _ in range(600):
        if not any(Path(f"/proc/{pid}/cmdline").exists() and cmdline(pid) for pid in workers):
            break
        time.sleep(0.05)
    assert not any(cmdline(pid) for pid in workers)
    assert not (tmp_path / "out" / "trie").exists()
    # A process that is killed leaves the file of its lock, which the system has released; the next run removes it.
    names = [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert names in ([], [".trie.lock"])
    subprocess.run([*command, tmp_path / "r.jsonl"], check=True, stdout=subprocess.DEVNULL)
    assert os.listdir(tmp_path / "out") == ["trie"]  # noqa: PTH208
    whole = tmp_path / "whole"
    subprocess.run([*build, whole, tmp_path / "r.jsonl"], check=True, stdout=subprocess.DEVNULL)
    assert contents(whole) == contents(tmp_path / "out" / "trie")


def cmdline(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def workers_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    pids = [int(child) for child in children.read_text().split()] if children.exists() else []
    # The resource tracker of multiprocessing is a child too; only workers run spawn_main.
    return [pid for pid in pids if "spawn_main" in cmdline(pid)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
