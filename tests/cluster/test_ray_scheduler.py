"""A Ray cluster gives the results of the scheduler of this process, also after the death of workers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import treepack
from support import ray_stages as stages
from support.ray_cluster import free_port, kill, machine
from support.refusal import refusal
from treepack.cluster.ray import WINDOW, RayScheduler, connected_cluster, refuse_unreachable
from treepack.cluster.scheduler import LocalScheduler
from treepack.errors import TreepackError

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def scheduler(cluster: str) -> Iterator[RayScheduler]:
    with connected_cluster(cluster) as scheduler:
        yield scheduler


def test_results_come_in_order_and_calls_are_taken_as_needed(scheduler: RayScheduler) -> None:
    num_taken = 0

    def calls() -> Iterator[tuple[int]]:
        nonlocal num_taken
        while True:
            yield (num_taken,)
            num_taken += 1

    results = scheduler.run(stages.square, calls())
    assert [next(results) for _ in range(30)] == [number**2 for number in range(30)]
    assert num_taken <= 30 + WINDOW * scheduler.num_workers
    results.close()  # type: ignore[attr-defined]
    assert list(scheduler.run(stages.square, [])) == []
    assert scheduler.num_workers == 2


def test_tables_stay_there_and_are_arguments_of_later_tasks(scheduler: RayScheduler) -> None:
    results = []
    for each in (LocalScheduler(), scheduler):
        kept = list(each.keep(stages.large_table_of, [(seed, 500) for seed in range(6)]))
        tables = [table for table, _ in kept]
        sums = each.run(stages.num_rows_and_sum, [(table, each.share(2)) for table in tables])
        results.append(([summary for _, summary in kept], list(sums)))
    assert results[0] == results[1]


def test_an_error_of_a_task_is_raised_as_in_one_process(scheduler: RayScheduler) -> None:
    calls = [(number,) for number in range(6)]
    results = scheduler.run(stages.refuses, calls)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    assert refusal(next, results) == "rollouts.jsonl:3: no tokens; remove the line"
    with pytest.raises(ZeroDivisionError):
        list(scheduler.run(stages.breaks, calls))
    assert refusal(list, scheduler.keep(stages.refuses_table, [(7,)])) == "table 7: cannot be made; give another"


def test_a_task_whose_worker_dies_runs_again(scheduler: RayScheduler, tmp_path: Path) -> None:
    calls = [(number, tmp_path / f"{number}") for number in range(4)]
    assert list(scheduler.run(stages.square_after_death, calls)) == [0, 1, 4, 9]
    assert len(list(tmp_path.iterdir())) == 4


def test_workers_killed_from_outside_change_nothing(scheduler: RayScheduler, tmp_path: Path) -> None:
    killed: list[int] = []

    def kill_two_workers() -> None:
        while len(killed) < 2:
            for path in tmp_path.iterdir():
                if (worker := int(path.name)) not in killed and len(killed) < 2:
                    os.kill(worker, signal.SIGKILL)
                    killed.append(worker)
            time.sleep(0.05)

    killer = threading.Thread(target=kill_two_workers)
    killer.start()
    results = list(scheduler.run(stages.slow_square, [(number, tmp_path) for number in range(20)]))
    killer.join()
    assert results == [number**2 for number in range(20)]
    assert len(killed) == 2


def test_a_task_that_always_kills_its_worker_is_one_sentence(scheduler: RayScheduler) -> None:
    with pytest.raises(TreepackError, match=r"^Ray could not finish a task, and 3 retries failed too .*partitions"):
        list(scheduler.run(stages.always_dies, [(1,)]))


def test_tables_lost_with_a_machine_are_made_again(cluster: str, scheduler: RayScheduler) -> None:
    import ray

    with machine(f"--address={cluster}", workers=2) as second:
        while sum(node["Alive"] for node in ray.nodes()) < 2:
            time.sleep(0.2)
        kept = [table for table, _ in scheduler.keep(stages.large_table_of, [(seed, 300) for seed in range(8)])]
        before = list(scheduler.run(stages.num_rows_and_sum, [(table, 1) for table in kept]))
        kill(second)
        while sum(node["Alive"] for node in ray.nodes()) > 1:
            time.sleep(0.2)
    assert list(scheduler.run(stages.num_rows_and_sum, [(table, 1) for table in kept])) == before
    assert sum(rows for rows, _ in before) == 8 * 300


def test_relative_paths_are_those_of_the_command(
    cluster: str, scheduler: RayScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert set(RayScheduler().run(stages.folder_of_task, [(number,) for number in range(4)])) == {str(tmp_path)}


def test_a_cluster_with_another_version_is_refused(
    cluster: str, scheduler: RayScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = treepack.__version__
    monkeypatch.setattr(treepack, "__version__", "99.0")
    with (
        pytest.raises(TreepackError, match=f"of the Ray cluster has treepack {version}; install treepack 99.0 there"),
        connected_cluster("auto"),
    ):
        pass
    with (
        pytest.raises(TreepackError, match="connected to a Ray cluster already; give auto"),
        connected_cluster(cluster),
    ):
        pass


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("127.0.0.1", "expected auto, local, HOST:PORT or ray://HOST:PORT"),
        ("ray://", "expected auto, local, HOST:PORT or ray://HOST:PORT"),
        ("127.0.0.1:{free}", "nothing answers there"),
        ("ray://127.0.0.1:{free}", "nothing answers there"),
    ],
)
def test_an_address_without_a_cluster_is_one_sentence(address: str, sentence: str) -> None:
    with pytest.raises(TreepackError, match=f"^--ray {address.format(free='.*')}.*: {sentence}"):
        refuse_unreachable(address.format(free=free_port()))
