"""Work in several processes: the same results in the same order, and no process that outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import TESTS
from support.refusal import refusal
from support.worker_jobs import Die, Divide, Echo, Modules, Process, Sum, add, value
from treepack.errors import TreepackError
from treepack.processes import WINDOW, ProcessTeam, in_order, unordered


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_the_order_of_the_pieces(workers: int) -> None:
    # 6 and 12 take 50 ms, the others nothing: many results overtake them.
    pieces = [6, 1, 12, 2, 3, 6, 1, 4, 12, 2, 3, 4, 6, 1, 2, 3, 4, 12, 1, 2]
    assert list(in_order(Divide, 12, pieces, workers=workers)) == [12 / piece for piece in pieces]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_comes_in_its_turn(workers: int) -> None:
    results = in_order(Divide, 12, [6, 3, 0, 1], workers=workers)
    assert [next(results), next(results)] == [2, 4]
    with pytest.raises(ZeroDivisionError):
        next(results)


@pytest.mark.parametrize("workers", [1, 3])
def test_unordered_results_have_the_numbers_of_their_pieces(workers: int) -> None:
    pieces = [6, 1, 12, 2, 3, 4]
    assert dict(unordered(Divide, 12, pieces, workers=workers)) == {0: 2, 1: 12, 2: 1, 3: 6, 4: 4, 5: 3}


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_unordered_pieces_is_raised(workers: int) -> None:
    with pytest.raises(ZeroDivisionError):
        list(unordered(Divide, 12, [6, 3, 0, 1], workers=workers))


# min_tasks 5 of 2 pieces: the error of the iterator appears before any worker is started.
@pytest.mark.parametrize(("workers", "min_tasks"), [(1, 1), (2, 1), (2, 5)])
def test_an_error_of_the_iterator_comes_after_the_results_before_it(workers: int, min_tasks: int) -> None:
    def pieces() -> Iterator[int]:
        yield from (6, 3)
        raise TreepackError("no more")

    results = in_order(Divide, 12, pieces(), workers=workers, min_tasks=min_tasks)
    assert [next(results), next(results)] == [2, 4]
    assert "no more" in refusal(next, results)


def test_no_piece_gives_no_result_and_needs_no_worker() -> None:
    # Die would end a worker, so the empty list also shows that no worker was given anything.
    assert list(in_order(Die, None, iter(()), workers=2)) == []


@pytest.mark.parametrize(("min_tasks", "is_here"), [(3, False), (4, True)])
def test_few_pieces_are_done_in_this_process(min_tasks: int, is_here: bool) -> None:
    pids = list(in_order(Process, None, range(3), workers=2, min_tasks=min_tasks))
    assert [pid == os.getpid() for pid in pids] == [is_here] * 3


def test_pieces_are_taken_only_as_results_are_consumed() -> None:
    taken = 0

    def pieces() -> Iterator[int]:
        nonlocal taken
        while taken < 1000:
            taken += 1
            yield 1

    results = in_order(Divide, 12, pieces(), workers=2)
    assert next(results) == 12
    assert 2 <= taken <= 2 * WINDOW


def test_large_pieces_and_results_do_not_wait_for_each_other() -> None:
    # 3 MiB is far more than a pipe holds (64 KiB on Linux), so a send blocks until the other side receives.
    pieces = [bytes([i]) * (3 << 20) for i in range(12)]
    assert list(in_order(Echo, None, pieces, workers=2)) == pieces


def test_workers_never_import_torch() -> None:
    assert list(in_order(Modules, None, ["torch", "sys", "torch"], workers=2)) == [False, True, False]


def test_a_worker_that_died_is_named() -> None:
    assert "a worker process died" in refusal(list, in_order(Die, None, [1], workers=2))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_team_keeps_its_states_between_rounds(workers: int) -> None:
    with ProcessTeam(Sum, [1000] * workers) as team:
        assert list(team.in_order(add, range(10))) == list(range(10))
        assert sorted(number for _, number in team.unordered(add, range(10, 20))) == list(range(10, 20))
        assert sum(team.each(value)) == 1000 * team.size + sum(range(20))
        assert team.size == workers


def test_a_small_first_round_makes_this_process_the_team() -> None:
    with ProcessTeam(Sum, [0, 0]) as team:
        assert list(team.in_order(add, [1, 2], min_size=10, size=lambda number: number)) == [1, 2]
        assert list(team.in_order(add, [100])) == [100]
        assert team.here is not None
        assert team.here.value == 103


PARENT = """
import multiprocessing, os, sys, time
sys.path.insert(0, {tests!r})
from treepack.processes import in_order
from support.worker_jobs import Wait
if __name__ == "__main__":
    try:
        for _ in in_order(Wait, None, range(100), workers=2):
            print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    except KeyboardInterrupt:
        print("interrupted", len(multiprocessing.active_children()))
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_parent_in_the_middle_of_a_piece(tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "parent.py").write_text(PARENT.format(tests=str(TESTS)))
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    children = [int(pid) for pid in process.stdout.readline().split()]
    assert len(children) == 2
    assert all(map(alive, children))
    process.send_signal(how)
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    # Only Ctrl-C lets the parent print; the other two signals kill it before it can.
    assert out == ("interrupted 0\n" if how == signal.SIGINT else "")
    for _ in range(600):  # at most 60 s: a worker ends when it notices the broken connection, not at the signal
        if not any(alive(pid) for pid in children):
            break
        time.sleep(0.1)
    assert not any(alive(pid) for pid in children)


def alive(pid: int) -> bool:
    """Return True if the process runs. A Linux zombie (ended, but its parent has not read its status) does not run."""
    try:
        os.kill(pid, 0)  # signal 0 sends nothing, it only checks that the process exists
        state = Path(f"/proc/{pid}/stat")
        # "42 (python) Z 1 ..." -> Z; the name in brackets may contain spaces, so split after the last bracket.
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
