"""Numbers that a run has chosen for options that are "auto", recorded in run.json for the runs that continue it.

options with "auto" --open_run--> options with a number --chosen_numbers--> {"carry": 8192} in run.json
options with "auto", `out` --with_recorded--> options with the number of the run in `out`
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from treepack.files.directory import RUN
from treepack.files.remote.address import AnyPath
from treepack.files.remote.stored_files import read_stored
from treepack.train.options import TrainOptions
from treepack.train.ranks import Ranks

# Options that may be "auto"; no number changes the result of a run except for rounding.
NAMES = ("carry", "checkpoint_layers", "pass_tokens")
ENTRY = "chosen"


def chosen_numbers(options: TrainOptions) -> dict[str, dict[str, int]]:
    """Return the entry of run.json: the numbers of `NAMES` that the run has; empty without any."""
    numbers = {name: getattr(options, name) for name in NAMES}
    numbers = {name: number for name, number in numbers.items() if isinstance(number, int)}
    return {ENTRY: numbers} if numbers else {}


def with_recorded(options: TrainOptions, out: AnyPath, ranks: Ranks) -> TrainOptions:
    """Return the options with the numbers of the run in `out` in place of "auto"; all ranks must call this function.

    Raises:
        TreepackError: the store cannot be reached.
    """
    names = [name for name in NAMES if getattr(options, name) == "auto"]
    if not names:
        return options
    numbers = [0] * len(names)

    def read() -> None:
        numbers[:] = [-1] * len(names)  # other ranks keep 0, so that the sum is the number of the first one
        content = read_stored(out / RUN)
        # A damaged file is refused by `directory.begin`.
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            recorded = json.loads(content or b"")[ENTRY]
            numbers[:] = [int(recorded.get(name, -1)) for name in names]

    # Only the first rank reads the file: it may also write it, before another one has looked for it.
    ranks.lead(read)
    known = ranks.sum(torch.tensor(numbers)).tolist()
    changes: dict[str, Any] = {name: number for name, number in zip(names, known, strict=True) if number >= 0}
    return replace(options, **changes)
