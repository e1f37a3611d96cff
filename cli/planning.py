"""The options by which rows are planned, for `pack`, `prepare`, `stats` and `report`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from treepack.analysis.options import StatsOptions
from treepack.pack.options import PackOptions

from .option_groups import Option, as_usage, field_options, option_group
from .progress import progress_bars

if TYPE_CHECKING:
    from treepack.files.remote.address import AnyPath

F = TypeVar("F", bound=Callable[..., Any])


_BALANCE = {"metavar": "RANKS", "show_default": False}
_LIMITS = field_options(
    PackOptions,
    "capacity pairs_budget terms_budget balance",
    pairs_budget={"metavar": "N"},
    terms_budget={"metavar": "N"},
    balance=_BALANCE,
)
_WORKERS = field_options(PackOptions, "workers")
_LOSS = field_options(PackOptions, "too_long semantics normalize leaf_weights fallback_leaves")


def _search(effort: str) -> list[Option[Any]]:
    return field_options(
        PackOptions,
        "method effort time_limit",
        effort={"default": effort},
        time_limit={"type": float, "metavar": "SECONDS"},
    )


def search_options(effort: str) -> Callable[[F], F]:
    """Add the options of a search to a command, which receives them as `search: PackOptions`."""
    return option_group("search", _search(effort), as_usage(PackOptions))


ranked_search_options = option_group(
    "search",
    [*field_options(PackOptions, "balance", balance=_BALANCE), *_search(StatsOptions().pack.effort)],
    as_usage(PackOptions),
)
"""Adds the options of a search and a number of ranks to a command, which receives them as `search: PackOptions`."""


def _target(*, model: str | None, device: str | None) -> dict[str, Any]:
    if model is None and device is not None:
        raise click.UsageError("--device is the device of a model; give --model too, or neither")
    device = device or StatsOptions().device
    if model is not None:
        from treepack.analysis.trie_forecast import read_target

        read_target(model, device)  # refuses a wrong name before prepare writes a trie
    return {"model": model, "device": device}


model_options = option_group(
    "target",
    field_options(
        StatsOptions,
        "model device",
        model={
            "metavar": "NAME|PATH",
            "default": None,
            "show_default": False,
            "help": "Model that is trained: without --capacity, take the capacity of the shortest expected time; with "
            "--balance, make the rows even in its time. A preset or a config.json, see docs/forecast.md.",
        },
        device={"metavar": "NAME|TFLOP/S", "default": None, "show_default": False},
    ),
    _target,
)
"""Adds a model and its device to a command, which receives them as `target: dict` for `chosen_options`."""

_PLANNING = _search(PackOptions().effort)
pack_options = option_group("options", [*_LIMITS, *_WORKERS, *_PLANNING, *_LOSS], as_usage(PackOptions))
"""Adds all options of packing to a command, which receives them as `options: PackOptions`."""

pack_options_without_workers = option_group("options", [*_LIMITS, *_PLANNING, *_LOSS], as_usage(PackOptions))
"""The same for a command that has --workers already."""


def chosen_options(
    trie: AnyPath, options: PackOptions, target: dict[str, Any], *, memory: int | None
) -> tuple[PackOptions, str]:
    """Return `options` with a capacity for the model of `target`, and the reason for the note of `show_packing`.

    Raises:
        TreepackError: no such model or device, or a trie that cannot be read or planned.
    """
    if target["model"] is None:
        if options.capacity is not None:
            return options, ""
        return options, "the usual capacity that every trajectory fits; --model MODEL takes the one that trains fastest"
    from treepack.analysis.trie_forecast import choose_options

    with progress_bars() as progress:
        return choose_options(trie, options, **target, memory=memory, progress=progress)


# Options that a plan file replaces: the limits and the search.
REPLACED_BY_PLAN = "capacity pairs_budget terms_budget balance model device workers method effort time_limit".split()
