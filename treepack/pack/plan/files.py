"""Plan files, which people can write and edit: JSON lines, with a header and then one line for each row.

    {"format": "treepack-plan", "version": 1, "capacity": 8192}
    {"trajectory_ids": ["rollout-1", "rollout-7"]}
    {"trajectory_ids": ["rollout-2"]}

The header may also contain `pairs` and `terms` (the budgets of a row), `multiple_of`, `method` (a name for the plan),
`trie` (sha256 of the manifest of the trie that was planned) and `lower_bound`. Rows keep their order. Blank lines are
ignored. `planning.py` makes a `Plan` of a file, and `check.py` checks it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treepack.errors import TreepackError, quoted_value
from treepack.files.remote.address import AnyPath
from treepack.files.remote.cache import local_copy
from treepack.pack.options import MAX_BUDGET, MAX_CAPACITY
from treepack.pack.plan.problem import RowLimits
from treepack.trajectory import Int64
from treepack.trie.trie import Trie

FORMAT = "treepack-plan"
VERSION = 1

# Keys of the header besides format and version, by type (int, str). All but capacity are optional.
_COUNTS = ("capacity", "pairs", "terms", "multiple_of", "lower_bound")
_NAMES = ("method", "trie")


@dataclass(frozen=True, slots=True)
class PlanFile:
    """The content of a plan file: `rows` is the trajectory ids of each row, `lines` the line number of each row.

    A key that the header does not contain is None, 0 for `lower_bound`, 1 for `multiple_of`, "given" for `method`.
    """

    path: Path
    limits: RowLimits
    multiple_of: int
    lower_bound: int
    method: str
    trie: str | None
    rows: list[list[str]]
    lines: list[int]


def lines_of_file(header: dict[str, Any], row_of: Int64, trajectory_ids: list[str]) -> Iterator[str]:
    """Yield the lines of a plan file, without line ends. Keys of `header` whose value is None are left out."""
    yield json.dumps({"format": FORMAT, "version": VERSION} | {k: v for k, v in header.items() if v is not None})
    # row_of [1, 0, 1] -> order [1, 0, 2], rows in order [0, 1, 1], cut after index 0 -> [1], [0, 2]
    order = np.argsort(row_of, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(row_of[order])) + 1):
        ids = [trajectory_ids[i] for i in members.tolist()]
        yield json.dumps({"trajectory_ids": ids}, ensure_ascii=False)


def read_plan_file(path: AnyPath) -> PlanFile:
    """Read a plan file. `rows_of_plan_file` and `check_plan` check that it fits a trie.

    Raises:
        TreepackError: the file cannot be read, or a line is malformed; the message names the file and the line.
    """
    path = local_copy(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: ids may contain U+2028
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
            raise TreepackError(f'{path}:{number}: is not a row; expected {{"trajectory_ids": [at least one id]}}')
    return PlanFile(
        path,
        RowLimits(header["capacity"], header.get("pairs"), header.get("terms")),
        header.get("multiple_of", 1),
        header.get("lower_bound", 0),
        header.get("method", "given"),
        header.get("trie"),
        [record["trajectory_ids"] for _, record in records[1:]],
        [number for number, _ in records[1:]],
    )


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TreepackError(f"{path}:{number}: malformed JSON ({error}); expected one object per line") from error
    if not isinstance(value, dict):
        raise TreepackError(f"{path}:{number}: is not a JSON object; expected one object per line")
    return value


def _check_header(path: Path, number: int, header: dict[str, Any]) -> None:
    if header.get("format") != FORMAT or "capacity" not in header:
        raise TreepackError(
            f"{path}:{number}: is not the header of a plan; expected "
            f'{{"format": "{FORMAT}", "version": {VERSION}, "capacity": N}}'
        )
    if header.get("version") != VERSION:
        raise TreepackError(
            f"{path}:{number}: has version {quoted_value(header.get('version'))}; this treepack reads version {VERSION}"
        )
    for name, value in header.items():
        # `type` and not isinstance, because True is an int; lower_bound may be 0, all other counts are at least 1.
        if name in _COUNTS and (type(value) is not int or value < (name != "lower_bound")):
            raise TreepackError(f"{path}:{number}: {name} is {quoted_value(value)}; expected a positive integer")
        if name in _COUNTS and value > (maximum := MAX_CAPACITY if name == "capacity" else MAX_BUDGET):
            raise TreepackError(f"{path}:{number}: {name} is {quoted_value(value)}; expected at most {maximum}")
        if name in _NAMES and not isinstance(value, str):
            raise TreepackError(f"{path}:{number}: {name} is {quoted_value(value)}; expected a string")
        if name not in (*_COUNTS, *_NAMES, "format", "version"):
            raise TreepackError(f"{path}:{number}: has the unknown key {quoted_value(name)}; remove it")


def rows_of_plan_file(file: PlanFile, trie: Trie) -> Int64:
    """Return the row of each trajectory of `trie`, int64 [num_trajectories].

    Raises:
        TreepackError: a trajectory of the file is not in `trie`, is in two rows, or is in none.
    """
    ids = trie.trajectories["trajectory_id"].to_pylist()
    index = {name: i for i, name in enumerate(ids)}
    row_of = np.full(len(ids), -1, np.int64)
    for row, (number, names) in enumerate(zip(file.lines, file.rows, strict=True)):
        for name in names:
            i = index.get(name, -1)
            if i < 0:
                raise TreepackError(
                    f"{file.path}:{number}: the trie has no trajectory {quoted_value(name)} to pack; remove it"
                )
            if row_of[i] >= 0:
                where = f"line {file.lines[row_of[i]]}" if row_of[i] != row else "the same line"
                raise TreepackError(f"{file.path}:{number}: trajectory {name} is on {where} too; remove one of them")
            row_of[i] = row
    missing = np.flatnonzero(row_of < 0)
    if len(missing):
        raise TreepackError(
            f"{file.path}: trajectory {ids[missing[0]]} and {len(missing) - 1} more are in no row; add them to rows"
        )
    return row_of
