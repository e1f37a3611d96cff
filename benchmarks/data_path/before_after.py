"""Compare the same commands before and after a change: processor time, time by the clock, peak memory, side by side.

    with Versions(revision) as versions:
        versions.compare("pack", treepack("pack", trie, "--out", OUT), units=("row tokens", 10_000_000))

"before" is a git revision, checked out beside this tree; "after" is this tree. Runs alternate, each in a fresh process
that imports the package of its version. The table gives the median of each version, and before / after. Processor time
is that of the process and of all its children. `OUT` in a command is a new path in each run.

A version that still compiles with numba needs numba: pip install numba. Its cache is kept between runs unless a case
sets NUMBA_CACHE_DIR.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[2]
BEFORE = "b50e7af"
OUT = "{out}"
_SIDES = ("before", "after")


@dataclass(frozen=True)
class Cost:
    """Cost of one run: seconds of processor time, seconds by the clock, MiB of the largest process, and its output."""

    processor: float
    clock: float
    memory: float
    output: str


def treepack(*arguments: object) -> list[str]:
    """Return the command line of treepack with `arguments`."""
    return [sys.executable, "-c", "import treepack_cli; treepack_cli.main()", *map(str, arguments)]


def program(path: Path, *arguments: object) -> list[str]:
    """Return the command line of a Python file, which imports the treepack of its version."""
    return [sys.executable, str(path), *map(str, arguments)]


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all comparisons have."""
    parser = argparse.ArgumentParser(
        description=(description or "").splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", default=BEFORE, help="git revision to compare with")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each version, alternating")
    parser.add_argument("--folder", type=Path, default=None, help="folder for inputs and outputs")
    return parser


class Versions:
    """The packages of two versions, each in a folder that PYTHONPATH can name."""

    def __init__(self, before: str, folder: Path | None = None, repeats: int = 3) -> None:
        self.before, self.repeats = before, repeats
        self._temporary = tempfile.TemporaryDirectory(dir=folder)
        self.folder = Path(self._temporary.name)

    def __enter__(self) -> Versions:
        tree = self.folder / "tree"
        _git("worktree", "add", "--quiet", "--detach", str(tree), self.before)
        for side, source in zip(_SIDES, (tree, ROOT), strict=True):
            path = self.folder / side
            path.mkdir()
            (path / "treepack").symlink_to(source / "treepack")
            (path / "treepack_cli").symlink_to(source / "cli")
        print(f"{platform.machine()}, Python {platform.python_version()}, {os.cpu_count()} cores, median of", end=" ")
        print(f"{self.repeats}, before {_git('rev-parse', '--short', self.before)},", end=" ")
        print(f"after {_git('rev-parse', '--short', 'HEAD')}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _git("worktree", "remove", "--force", str(self.folder / "tree"))
        self._temporary.cleanup()

    def compare(
        self,
        name: str,
        command: Sequence[str],
        *,
        units: tuple[str, float] | None = None,
        environment: Mapping[str, str] | None = None,
        after: Sequence[str] | None = None,
        inspect: Callable[[str, Path], None] | None = None,
    ) -> dict[str, Cost]:
        """Run `command` of both versions and print a line of the table; return the median cost of each.

        Args:
            name: the first column.
            command: what to run; see `treepack` and `program`.
            units: the name and number of the things that a run works on, for a rate.
            environment: variables to set.
            after: another command for this tree, for example with an option that the old version lacks.
            inspect: called with "before" or "after" and the output path of each run, before it is removed.
        """
        costs: dict[str, list[Cost]] = {side: [] for side in _SIDES}
        for _ in range(self.repeats):
            for side in _SIDES:
                out = Path(tempfile.mkdtemp(dir=self.folder)) / "out"
                chosen = after if after is not None and side == "after" else command
                costs[side].append(self.measure(side, chosen, out, environment))
                if inspect is not None:
                    inspect(side, out)
                shutil.rmtree(out.parent)
        medians = {side: _median(costs[side]) for side in _SIDES}
        _print(name, medians, units)
        return medians

    def measure(
        self, side: str, command: Sequence[str], out: Path, environment: Mapping[str, str] | None = None
    ) -> Cost:
        """Run `command` once with the package of "before" or "after"."""
        # As for a user: without bytecode, every start would compile all modules, which takes about half a second.
        bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(self.folder / "bytecode")}
        variables = {**os.environ, **bytecode, "PYTHONPATH": str(self.folder / side), **(environment or {})}
        argv = [part.replace(OUT, str(out)) for part in command]
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            start = time.monotonic()
            process = subprocess.Popen(argv, env=variables, stdout=output, stderr=errors, cwd=self.folder)
            _, status, usage = os.wait4(process.pid, 0)  # includes children that the process has waited for
            clock = time.monotonic() - start
            process.returncode = os.waitstatus_to_exitcode(status)
            output.seek(0), errors.seek(0)
            if process.returncode:
                sys.exit(f"failed ({side}): {' '.join(argv)}\n{errors.read()}")
            return Cost(usage.ru_utime + usage.ru_stime, clock, usage.ru_maxrss / 1024, output.read())


def header() -> None:
    """Print the header of the table."""
    print("| case | processor s, before | after | ratio | clock s, before | after | ratio | after, M units/s |")
    print("|---|---|---|---|---|---|---|---|")


def printed_seconds(cost: Cost) -> float:
    """Return the seconds that a program printed as the last line of its output, as a JSON number."""
    return float(json.loads(cost.output.strip().splitlines()[-1]))


def _median(costs: list[Cost]) -> Cost:
    middle = statistics.median
    return Cost(
        middle(cost.processor for cost in costs),
        middle(cost.clock for cost in costs),
        middle(cost.memory for cost in costs),
        costs[-1].output,
    )


def _print(name: str, cost: Mapping[str, Cost], units: tuple[str, float] | None) -> None:
    before, after = cost["before"], cost["after"]
    rate = "" if units is None else f"{units[1] / after.processor / 1e6:.1f} M {units[0]}/s"
    print(
        f"| {name} | {before.processor:.2f} | {after.processor:.2f} | {before.processor / after.processor:.2f} "
        f"| {before.clock:.2f} | {after.clock:.2f} | {before.clock / after.clock:.2f} | {rate} |",
        flush=True,
    )


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()
