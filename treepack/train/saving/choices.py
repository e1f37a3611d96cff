"""Values that a run has chosen, recorded in run.json for the runs that continue it.

options with "auto" --open_run--> options with values --chosen_values--> {"carry": 8192, ...} in run.json
options with "auto", `out` --with_recorded--> options with the values of the run in `out`
options with values, `out` --recorded_memory--> what that run measured with the same values
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

from treepack.errors import TreepackError
from treepack.files.directory import RUN
from treepack.files.remote.address import AnyPath
from treepack.files.remote.stored_files import read_stored
from treepack.fit.rung import PLANNED
from treepack.train.options import RANK_OPTIONS, TrainOptions
from treepack.train.ranks import Ranks
from treepack.train.run import TrainingRun

ENTRY = "chosen"


def chosen_values(run: TrainingRun) -> dict[str, dict[str, Any]]:
    """Return the entry of run.json: the values of `PLANNED`, those of several ranks, and lines about them if any."""
    names = (*PLANNED, *(RANK_OPTIONS if run.ranks.size > 1 else ()))
    values: dict[str, Any] = {name: getattr(run.options, name) for name in names}
    if run.ranks.size > 1:
        values["ranks"] = run.ranks.size
    if run.memory is not None:
        values["memory"] = {**run.memory.record, "excess": run.memory.excess}
    return {ENTRY: {**values, **({"why": list(run.choices)} if run.choices else {})}}


def with_recorded(options: TrainOptions, out: AnyPath, ranks: Ranks) -> TrainOptions:
    """Return the options with the values of the run in `out`, if there is one; all ranks must call this function.

    They replace "auto", and a number of blocks that is None: a resumed run keeps its order on any number of machines,
    and its old log-probabilities with any number of steps.
    The choices of several ranks are taken again by the same number of ranks.

    Raises:
        TreepackError: the store cannot be reached.
    """
    # Only the first rank reads the file: it may also write it, before another one has looked for it.
    return replace(options, **ranks.lead(lambda: _recorded(options, out, ranks.size)))


def recorded_memory(options: TrainOptions, out: AnyPath, ranks: Ranks) -> dict[str, Any]:
    """Return the bytes that the run in `out` measured with the values of `options` on equally many ranks, or {}.

    All ranks must call this function.

    Raises:
        TreepackError: the store cannot be reached.
    """

    def read() -> dict[str, Any]:
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            chosen = json.loads(read_stored(out / RUN) or b"")[ENTRY]
            same = all(chosen[name] == getattr(options, name) for name in PLANNED)
            return dict(chosen["memory"]) if same and chosen.get("ranks", 1) == ranks.size else {}
        return {}

    return ranks.lead(read)


def _recorded(options: TrainOptions, out: AnyPath, num_ranks: int) -> dict[str, Any]:
    """Return the values in the run.json of `out` for options that have none."""
    content = read_stored(out / RUN)
    values: dict[str, Any] = {}
    # A damaged file is refused by `run_directory.begin`.
    with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError, TreepackError):
        record = json.loads(content or b"")
        if options.blocks is None:
            values["blocks"] = int(record["options"].get("blocks", 1))
        if options.objective.old_logprobs == "auto":
            old = record["options"]["objective"].get("old_logprobs", "recorded")
            values["objective"] = replace(options.objective, old_logprobs=old)
        chosen = record.get(ENTRY, {})
        names = (*PLANNED, *(RANK_OPTIONS if chosen.get("ranks") == num_ranks else ()))
        given = {name: chosen[name] for name in names if getattr(options, name) == "auto" and name in chosen}
        replace(options, **given)  # refuses values of a damaged file
        values |= given
    return values
