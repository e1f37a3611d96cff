"""Work in several processes: the same answers in the same order, and nothing that outlives its parent."""

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
from treepack.errors import TreepackError
from treepack.processes import HELD, in_order


class Divide:
    """12 over a number; a large one is a long wait, so that later answers are there before earlier ones."""

    def __init__(self, numerator: int) -> None:
        self.numerator = numerator

    def __call__(self, number: int) -> float:
        if number > 5:
            time.sleep(0.05)
        return self.numerator / number


class Modules:
    def __init__(self, job: None) -> None:
        pass

    def __call__(self, name: str) -> bool:
        return sys.modules.get(name) is not None


class Die:
    def __init__(self, job: None) -> None:
        pass

    def __call__(self, piece: int) -> None:
        os._exit(1)


@pytest.mark.parametrize("workers", [1, 3])
def test_answers_come_in_the_order_of_the_pieces(workers: int) -> None:
    pieces = [6, 1, 12, 2, 3, 6, 1, 4, 12, 2, 3, 4, 6, 1, 2, 3, 4, 12, 1, 2]
    assert list(in_order(Divide, 12, pieces, workers=workers)) == [12 / piece for piece in pieces]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_comes_in_its_turn(workers: int) -> None:
    answers = in_order(Divide, 12, [6, 3, 0, 1], workers=workers)
    assert [next(answers), next(answers)] == [2, 4]
    with pytest.raises(ZeroDivisionError):
        next(answers)


@pytest.mark.parametrize(("workers", "fewest"), [(1, 1), (2, 1), (2, 5)])
def test_what_getting_a_piece_raises_comes_after_the_answers_before_it(workers: int, fewest: int) -> None:
    def pieces() -> Iterator[int]:
        yield from (6, 3)
        raise TreepackError("no more")

    answers = in_order(Divide, 12, pieces(), workers=workers, fewest=fewest)
    assert [next(answers), next(answers)] == [2, 4]
    with pytest.raises(TreepackError, match="no more"):
        next(answers)


def test_no_piece_gives_no_answer_and_needs_no_worker() -> None:
    assert list(in_order(Die, None, iter(()), workers=2)) == []


class Process:
    def __init__(self, job: None) -> None:
        pass

    def __call__(self, piece: int) -> int:
        return os.getpid()


@pytest.mark.parametrize(("fewest", "is_here"), [(3, False), (4, True)])
def test_few_pieces_are_worked_at_in_this_process(fewest: int, is_here: bool) -> None:
    pids = list(in_order(Process, None, range(3), workers=2, fewest=fewest))
    assert [pid == os.getpid() for pid in pids] == [is_here] * 3


def test_pieces_are_taken_up_only_as_answers_are_asked_for() -> None:
    taken = 0

    def pieces() -> Iterator[int]:
        nonlocal taken
        while taken < 1000:
            taken += 1
            yield 1

    answers = in_order(Divide, 12, pieces(), workers=2)
    assert next(answers) == 12
    assert 2 <= taken <= 2 * HELD


def test_large_pieces_and_answers_do_not_wait_for_each_other() -> None:
    pieces = [bytes([i]) * (3 << 20) for i in range(12)]
    assert list(in_order(Echo, None, pieces, workers=2)) == pieces


class Echo:
    def __init__(self, job: None) -> None:
        pass

    def __call__(self, piece: bytes) -> bytes:
        return piece


def test_workers_never_import_torch() -> None:
    assert list(in_order(Modules, None, ["torch", "sys", "torch"], workers=2)) == [False, True, False]


def test_a_worker_that_died_is_named() -> None:
    with pytest.raises(TreepackError, match="a worker process died"):
        list(in_order(Die, None, [1], workers=2))


PARENT = """
import multiprocessing, os, sys, time
sys.path.insert(0, {tests!r})
from treepack.processes import in_order
import test_processes
if __name__ == "__main__":
    try:
        for _ in in_order(test_processes.Wait, None, range(100), workers=2):
            print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    except KeyboardInterrupt:
        print("interrupted", len(multiprocessing.active_children()))
"""


class Wait:
    def __init__(self, job: None) -> None:
        pass

    def __call__(self, piece: int) -> None:
        if piece:
            time.sleep(600)


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
    assert out == ("interrupted 0\n" if how == signal.SIGINT else "")
    for _ in range(600):
        if not any(alive(pid) for pid in children):
            break
        time.sleep(0.1)
    assert not any(alive(pid) for pid in children)


def alive(pid: int) -> bool:
    """Whether the process runs; on Linux one that has ended and that nobody has asked about does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
