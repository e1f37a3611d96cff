"""`build-trie` and `pack` on a Ray cluster give the results of one process, also after the death of workers."""

from __future__ import annotations

import filecmp
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from support.command_line import Result, Run
from support.ray_rollouts import local_tables, tables_of, write_rollouts
from support.s3 import Store
from treepack import build_trie_directory, pack_trie
from treepack.cluster.build import build_trie_on
from treepack.cluster.pack import pack_trie_on
from treepack.cluster.ray import connected_cluster
from treepack.cluster.shares import ShareRecord
from treepack.files.directory import finished_directory
from treepack.pack.options import PackOptions

pytestmark = pytest.mark.ray

CAPACITY = 1024
Content = tuple[dict[str, Any], dict[str, pa.Table]]


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rollouts(tmp_path_factory.mktemp("rollouts") / "in")


@pytest.fixture(scope="module")
def trie(rollouts: Path) -> Path:
    """The trie that one process builds."""
    build_trie_directory([rollouts], rollouts.with_name("trie"))
    return rollouts.with_name("trie")


@pytest.fixture(scope="module")
def packed(trie: Path) -> Path:
    """The rows that one process packs."""
    pack_trie(trie, trie.with_name("packed"), PackOptions(capacity=CAPACITY))
    return trie.with_name("packed")


def successful(result: Result) -> Result:
    assert result.status == 0, result.err
    return result


def assert_same_bytes(one: Path, other: Path) -> None:
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    assert filecmp.cmpfiles(one, other, names, shallow=False) == (names, [], [])
    assert not other.with_name(f".{other.name}.shares").exists()


def assert_same_samples(one: Content, other: Content) -> None:
    """As many trajectories, terms and weights, in rows of about as many tokens; `stats --check` compares the rest."""
    totals, there = one[0]["totals"], other[0]["totals"]
    for name in ("num_trajectories", "tokens_flat", "tokens_tree", "tokens_trained"):
        assert totals[name] == there[name]
    # Each part repeats the system prompt, which is much of a part of this small trie, and little of a large one.
    assert there["tokens_packed"] - there["repeated_tokens"] <= 1.005 * totals["tokens_packed"]


def lines_of(result: Result) -> list[list[str]]:
    """The words of a summary, without the line about the speed."""
    return [line.split() for line in result.out.splitlines() if not line.startswith("tokens_per_second")]


def test_build_trie_and_pack_are_as_in_one_process(
    treepack: Run, cluster: str, rollouts: Path, trie: Path, packed: Path, tmp_path: Path
) -> None:
    ray = ("--ray", cluster)
    built = successful(treepack("build-trie", rollouts, "--out", tmp_path / "trie", *ray))
    assert_same_bytes(trie, tmp_path / "trie")
    parts = (*ray, "--partitions", 3)
    made = successful(treepack("pack", tmp_path / "trie", "--capacity", CAPACITY, "--out", tmp_path / "packed", *parts))
    assert_same_samples(local_tables(packed), local_tables(tmp_path / "packed"))
    checked = successful(treepack("stats", tmp_path / "packed", "--check", "--json")).json["checked"]
    assert isinstance(checked, dict)
    assert checked["against_trie"] is True
    alone = successful(treepack("build-trie", rollouts, "--out", tmp_path / "alone"))
    assert lines_of(built) == lines_of(alone)
    assert "N_pack" in made.out


def test_rows_are_even_in_the_time_of_a_model(treepack: Run, cluster: str, trie: Path, tmp_path: Path) -> None:
    options = ("--capacity", CAPACITY, "--partitions", 2, "--balance", 2, "--model", "qwen3-8b")
    successful(treepack("pack", trie, "--out", tmp_path / "on", *options, "--ray", cluster))
    successful(treepack("pack", trie, "--out", tmp_path / "alone", *options))
    assert_same_bytes(tmp_path / "alone", tmp_path / "on")
    manifest, tables = local_tables(tmp_path / "on")
    assert manifest["options"]["token_pairs"] > 0
    steps = Counter(step for table in tables.values() for step in table["step"].to_pylist())
    assert steps
    assert all(number % 2 == 0 for number in steps.values())


def test_a_local_cluster_gives_the_same_trie(rollouts: Path, trie: Path, tmp_path: Path) -> None:
    # In a process of its own, because a process connects to one cluster in its life.
    command: list[str | Path] = [
        Path(sys.executable).with_name("treepack"),
        "build-trie",
        rollouts,
        "--out",
        tmp_path / "trie",
    ]
    command += ["--ray", "local", "--workers", "2", "--quiet"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert_same_bytes(trie, tmp_path / "trie")
    assert "N_tree" in run.stdout
    assert "ray" not in run.stdout.lower()
    assert run.stderr == ""


def test_a_client_of_a_cluster_gets_the_same_trie(
    treepack: Run, client_server: str, rollouts: Path, trie: Path, tmp_path: Path
) -> None:
    successful(treepack("build-trie", rollouts, "--out", tmp_path / "trie", "--ray", client_server))
    assert_same_bytes(trie, tmp_path / "trie")


def test_a_client_that_is_refused_leaves_the_process_free_for_a_cluster(
    treepack: Run, cluster: str, client_server: str, rollouts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ConnectionAbortedError("Initialization failure from server:\nThe server for this client did not start.")

    monkeypatch.setattr("ray.util.client.worker.Worker._server_init", refuse)
    command = ("build-trie", rollouts, "--out", tmp_path / "trie", "--ray")
    refused = treepack(*command, client_server)
    assert refused.status == 1
    assert refused.err.count("\n") == 1
    assert "(Initialization failure from server: The server for this client did not start)" in refused.err
    successful(treepack(*command, cluster))


def test_a_client_that_a_busy_cluster_does_not_serve_at_once_tries_again(
    treepack: Run, client_server: str, rollouts: Path, trie: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.util.client.worker import Worker

    start, attempts = Worker._server_init, []

    def fail_once(*call: Any) -> None:
        attempts.append(call)
        if len(attempts) == 1:
            raise ConnectionAbortedError("Initialization failure from server:\nTraceback:\n  in f\nTimeoutError: late")
        start(*call)

    monkeypatch.setattr(Worker, "_server_init", fail_once)
    successful(treepack("build-trie", rollouts, "--out", tmp_path / "trie", "--ray", client_server))
    assert len(attempts) == 2
    assert_same_bytes(trie, tmp_path / "trie")


def test_objects_of_a_store_give_the_results_of_files(
    treepack: Run, cluster: str, shared_store: Store, rollouts: Path, packed: Path
) -> None:
    shared_store.upload(rollouts, "in")
    address = shared_store.address()
    successful(treepack("build-trie", f"{address}/in", "--out", f"{address}/one"))
    successful(treepack("build-trie", f"{address}/in", "--out", f"{address}/trie", "--ray", cluster))
    assert shared_store.read("trie/manifest.json") == shared_store.read("one/manifest.json")  # it has all hashes
    rows = ("--capacity", CAPACITY, "--out", f"{address}/packed", "--ray", cluster, "--partitions", 3)
    successful(treepack("pack", f"{address}/trie", *rows))
    assert_same_samples(local_tables(packed), tables_of(lambda name: shared_store.read(f"packed/{name}")))
    successful(treepack("stats", f"{address}/packed", "--check"))
    assert not [name for name in shared_store.names() if "unfinished" in name or ".shares" in name]


def workers_of_cluster() -> list[int]:
    """The processes that run a task of the cluster of these tests now; its token is in their environment."""
    token = f"RAY_AUTH_TOKEN={os.environ['RAY_AUTH_TOKEN']}".encode()
    workers = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes()
            is_worker = title.startswith(b"ray::") and b"IDLE" not in title and b"Agent" not in title
            if is_worker and token in (folder / "environ").read_bytes().split(b"\0"):
                workers.append(int(folder.name))
        except OSError:  # it has ended
            continue
    return workers


@contextmanager
def killed_workers(number: int) -> Iterator[list[int]]:
    """Kill `number` workers in the middle of their tasks during the block, one after the other."""
    killed: list[int] = []
    is_over = threading.Event()

    def kill() -> None:
        while len(killed) < number and not is_over.is_set():
            for worker in workers_of_cluster()[:1]:
                os.kill(worker, signal.SIGKILL)
                killed.append(worker)
                time.sleep(0.3)
            time.sleep(0.002)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        is_over.set()
        thread.join()


def test_killed_workers_change_nothing(
    treepack: Run, cluster: str, rollouts: Path, trie: Path, packed: Path, tmp_path: Path
) -> None:
    with connected_cluster(cluster) as scheduler:
        with killed_workers(2) as killed:
            build_trie_on(scheduler, [rollouts], tmp_path / "trie", share_bytes=1)
        assert len(killed) == 2
        assert_same_bytes(trie, tmp_path / "trie")
        with killed_workers(1) as killed:
            pack_trie_on(scheduler, trie, tmp_path / "packed", PackOptions(capacity=CAPACITY), num_slices=5)
        assert len(killed) == 1
    successful(treepack("stats", tmp_path / "packed", "--check"))
    assert_same_samples(local_tables(packed), local_tables(tmp_path / "packed"))
    assert not list(tmp_path.glob("*/.task-*"))


_KILLED = """
import sys
from treepack.cluster.build import build_trie_on
from treepack.cluster.ray import connected_cluster
from treepack.cluster.shares import ShareRecord
with connected_cluster(sys.argv[1]) as scheduler:
    build_trie_on(scheduler, [sys.argv[2]], sys.argv[3], share_bytes=1)
"""


def test_a_command_that_was_killed_starts_again_with_the_finished_shares(
    cluster: str, trie: Path, rollouts: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", _KILLED, cluster, str(rollouts), str(tmp_path / "trie")]
    shares = tmp_path / ".trie.shares"
    run = subprocess.Popen(command)
    while run.poll() is None and len(list(shares.glob("*.json"))) < 1:
        time.sleep(0.002)
    run.kill()
    run.wait()
    time.sleep(2)  # Ray ends the tasks of the command
    kept = {path: path.stat().st_mtime_ns for path in shares.glob("*.json")}
    assert kept
    assert not (tmp_path / "trie").exists()
    with connected_cluster(cluster) as scheduler:
        written: list[ShareRecord] = []
        run_tasks = scheduler.run
        scheduler.run = lambda function, calls: (written.append(each) or each for each in run_tasks(function, calls))  # type: ignore[func-returns-value, method-assign]
        build_trie_on(scheduler, [rollouts], tmp_path / "trie", share_bytes=1)
    names = {f"{record.trie}".partition("-")[0] for record in written}
    assert {path.stem for path in kept} <= names
    assert_same_bytes(trie, tmp_path / "trie")


def test_a_failed_task_leaves_no_output_and_one_sentence(treepack: Run, cluster: str, tmp_path: Path) -> None:
    folder = write_rollouts(tmp_path / "in")
    with (folder / "1.jsonl").open("a") as file:
        file.write('{"id": "x", "input_ids": [1, 2\n')
    alone = treepack("build-trie", folder, "--out", tmp_path / "trie")
    result = treepack("build-trie", folder, "--out", tmp_path / "trie", "--ray", cluster)
    assert (result.status, result.err) == (1, alone.err)
    assert "1.jsonl:97" in result.err
    assert [path.name for path in tmp_path.iterdir() if path.name != "in"] == []


def test_a_second_writer_is_refused(treepack: Run, cluster: str, rollouts: Path, trie: Path, tmp_path: Path) -> None:
    commands = (["build-trie", rollouts], ["pack", trie, "--capacity", CAPACITY])
    # Outputs are locked for a thread: the command in another one is another writer.
    with ThreadPoolExecutor(1) as others, finished_directory(tmp_path / "out") as temporary:
        for command in commands:
            run = partial(treepack, *command, "--out", tmp_path / "out", "--ray", cluster)
            result = others.submit(run).result()
            assert result.status == 1
            assert result.err.count("\n") == 1
            assert "out: is being written by" in result.err
        (temporary / "manifest.json").write_text("{}")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["manifest.json"]


def test_a_cluster_that_does_not_answer_is_one_sentence(treepack: Run, rollouts: Path, tmp_path: Path) -> None:
    result = treepack("build-trie", rollouts, "--out", tmp_path / "trie", "--ray", "127.0.0.1:9")
    assert result.status == 1
    assert result.err.count("\n") == 1
    assert "--ray 127.0.0.1:9: nothing answers there" in result.err
