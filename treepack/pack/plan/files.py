"""A plan as a file to read, write and edit by hand: JSON lines, a header and then one line for each row.

    {"format": "treepack-plan", "version": 1, "capacity": 8192}
    {"trajectory_ids": ["rollout-1", "rollout-7"]}
    {"trajectory_ids": ["rollout-2"]}

The header may also give `pairs` and `terms` (the budgets of a row), `multiple_of`, `method` (the name to keep), `trie`
(sha256 of the manifest of the trie that it is for) and `lower_bound`. Rows keep their order; blank lines do not count.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.pack.plan.problem import MOST_COUNTED, MOST_TOKENS, Limits
from treepack.trajectory import Int64
from treepack.trie.trie import Trie

FORMAT = "treepack-plan"
VERSION = 1

# Keys of the header besides format and version, with the kind of each; all but capacity may be missing.
_COUNTS = ("capacity", "pairs", "terms", "multiple_of", "lower_bound")
_NAMES = ("method", "trie")


@dataclass(frozen=True, slots=True)
class PlanFile:
    """The lines of a plan file: `rows` holds the trajectory ids of each row, `lines` the line that each row stands on.

    0 and None stand for what the header does not give.
    """

    path: Path
    limits: Limits
    multiple_of: int
    lower_bound: int
    method: str
    trie: str | None
    rows: list[list[str]]
    lines: list[int]


def plan_lines(header: dict[str, Any], row_of: Int64, trajectory_ids: list[str]) -> Iterator[str]:
    """The lines of a plan file, without line ends; what is None in `header` is left out."""
    yield json.dumps({"format": FORMAT, "version": VERSION} | {k: v for k, v in header.items() if v is not None})
    order = np.argsort(row_of, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(row_of[order])) + 1):
        ids = [trajectory_ids[i] for i in members.tolist()]
        yield json.dumps({"trajectory_ids": ids}, ensure_ascii=False)


def read_plan_file(path: Path) -> PlanFile:
    """Read a plan file; whether it fits a trie is for `rows_of` and `check_plan` to say.

    Raises:
        TreepackError: naming the file, the line and what is wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # ids may hold other line separators
    except OSError as error:
        raise TreepackError(f"{path}: cannot be read ({error.strerror}); give a plan file to --plan") from error
    except ValueError as error:
        raise TreepackError(f"{path}: is not UTF-8 text; give a plan file to --plan") from error
    records = [(number, _object(path, number, line)) for number, line in enumerate(lines, 1) if line.strip()]
    if not records:
        raise TreepackError(f"{path}: is empty; expected a header and one line for each row")
    _check_header(path, *records[0])
    header = records[0][1]
    for number, record in records[1:]:
        ids = record.get("trajectory_ids")
        if not isinstance(ids, list) or not ids or not all(isinstance(name, str) for name in ids):
            raise TreepackError(f'{path}:{number}: is no row; expected {{"trajectory_ids": [at least one id]}}')
    return PlanFile(
        path,
        Limits(header["capacity"], header.get("pairs"), header.get("terms")),
        header.get("multiple_of", 1),
        header.get("lower_bound", 0),
        header.get("method", "given"),
        header.get("trie"),
        [record["trajectory_ids"] for _, record in records[1:]],
        [number for number, _ in records[1:]],
    )


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TreepackError(f"{path}:{number}: malformed JSON ({error}); expected one object a line") from error
    if not isinstance(found, dict):
        raise TreepackError(f"{path}:{number}: is no JSON object; expected one object a line")
    return found


def _check_header(path: Path, number: int, header: dict[str, Any]) -> None:
    if header.get("format") != FORMAT or "capacity" not in header:
        raise TreepackError(
            f"{path}:{number}: is no header of a plan; expected "
            f'{{"format": "{FORMAT}", "version": {VERSION}, "capacity": N}}'
        )
    if header.get("version") != VERSION:
        raise TreepackError(
            f"{path}:{number}: has version {header.get('version')!r}; this treepack reads version {VERSION}"
        )
    for name, value in header.items():
        if name in _COUNTS and (type(value) is not int or value < (name != "lower_bound")):
            raise TreepackError(f"{path}:{number}: {name} is {value!r}; expected a positive integer")
        if name in _COUNTS and value > (most := MOST_TOKENS if name == "capacity" else MOST_COUNTED):
            raise TreepackError(f"{path}:{number}: {name} is {value}; expected at most {most}")
        if name in _NAMES and not isinstance(value, str):
            raise TreepackError(f"{path}:{number}: {name} is {value!r}; expected a string")
        if name not in (*_COUNTS, *_NAMES, "format", "version"):
            raise TreepackError(f"{path}:{number}: has the unknown key {name!r}; leave it out")


def rows_of(given: PlanFile, trie: Trie) -> Int64:
    """The row of each trajectory of `trie`, int64 [num_trajectories].

    Raises:
        TreepackError: a trajectory that `trie` does not have, that is in two rows, or in none.
    """
    ids = trie.trajectories["trajectory_id"].to_pylist()
    index = {name: i for i, name in enumerate(ids)}
    row_of = np.full(len(ids), -1, np.int64)
    for row, (number, names) in enumerate(zip(given.lines, given.rows, strict=True)):
        for name in names:
            i = index.get(name, -1)
            if i < 0:
                raise TreepackError(f"{given.path}:{number}: the trie has no trajectory {name} to pack; leave it out")
            if row_of[i] >= 0:
                where = f"line {given.lines[row_of[i]]}" if row_of[i] != row else "the same line"
                raise TreepackError(f"{given.path}:{number}: trajectory {name} is on {where} too; leave one out")
            row_of[i] = row
    lost = np.flatnonzero(row_of < 0)
    if len(lost):
        raise TreepackError(
            f"{given.path}: trajectory {ids[lost[0]]} and {len(lost) - 1} more are in no row; add them to rows"
        )
    return row_of
