"""The options by which rows are planned, for `pack`, `prepare`, `stats` and `report`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import click

from treepack.analysis.options import StatsOptions
from treepack.pack.options import PackOptions

from .option_groups import Option, as_usage, field_options, option_group

_F = TypeVar("_F", bound=Callable[..., Any])


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


def search_options(effort: str) -> Callable[[_F], _F]:
    """Add the options of a search to a command, which receives them as `search: PackOptions`."""
    return option_group("search", _search(effort), as_usage(PackOptions))


ranked_search_options = option_group(
    "search",
    [*field_options(PackOptions, "balance", balance=_BALANCE), *_search(StatsOptions().pack.effort)],
    as_usage(PackOptions),
)
"""Adds the options of a search and a number of ranks to a command, which receives them as `search: PackOptions`."""


def _packing(*, model: str | None, **given: Any) -> PackOptions:
    """Return the options of packing; with a model, rows are even in its time."""
    options = as_usage(PackOptions)(**given)
    if model is None:
        return options
    if options.balance == 1:
        raise click.UsageError(
            "--model makes the rows of --balance RANKS even in its time, and chooses no capacity; give --balance too, "
            "or --capacity, which stats TRIE compares"
        )
    from treepack.costs.model_cost import pairs_of_token, read_shape

    return replace(options, token_pairs=pairs_of_token(read_shape(model)))


_PLANNING = [
    *_search(PackOptions().effort),
    click.option(
        "--model",
        metavar="NAME|PATH",
        help="With --balance: make the rows even in the time of this model, a preset or a config.json; see "
        "docs/forecast.md.",
    ),
]
pack_options = option_group("options", [*_LIMITS, *_WORKERS, *_PLANNING, *_LOSS], _packing)
"""Adds all options of packing to a command, which receives them as `options: PackOptions`."""

pack_options_without_workers = option_group("options", [*_LIMITS, *_PLANNING, *_LOSS], _packing)
"""The same for a command that has --workers already."""

# Options that a plan file replaces: the limits and the search.
REPLACED_BY_PLAN = "capacity pairs_budget terms_budget balance model workers method effort time_limit".split()
