"""The options by which rows are planned, for `pack`, `stats` and `report`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from treepack.pack.options import PackOptions

from .option_groups import Option, as_usage, field_options, option_group

F = TypeVar("F", bound=Callable[..., Any])


def _finite(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a number of seconds", context, option)
    return value


def _token_pairs(_: click.Context, __: click.Parameter, model: str | None) -> int:
    if model is None:
        return 0
    from treepack.costs.model_cost import pairs_of_token, read_shape

    return pairs_of_token(read_shape(model))


_LIMITS = field_options(
    PackOptions,
    "capacity pairs_budget terms_budget balance token_pairs",
    pairs_budget={"metavar": "N"},
    terms_budget={"metavar": "N"},
    balance={"metavar": "ROWS_MULTIPLE_OF", "show_default": False},
    token_pairs={
        "name": "balance-model",
        "type": str,
        "metavar": "MODEL",
        "default": None,
        "show_default": False,
        "callback": _token_pairs,
    },
)
_WORKERS = field_options(PackOptions, "workers")
_LOSS = field_options(PackOptions, "too_long semantics normalize leaf_weights fallback_leaves")


def _search(effort: str) -> list[Option[Any]]:
    return field_options(
        PackOptions,
        "method effort time_limit",
        effort={"default": effort},
        time_limit={
            "type": click.FloatRange(min=0, min_open=True),
            "metavar": "SECONDS",
            "callback": _finite,
        },
    )


def search_options(effort: str) -> Callable[[F], F]:
    """Add the options of a search to a command, which receives them as `search: PackOptions`."""
    return option_group("search", _search(effort), as_usage(PackOptions))


_PLANNING = _search(PackOptions().effort)
pack_options = option_group("options", [*_LIMITS, *_WORKERS, *_PLANNING, *_LOSS], as_usage(PackOptions))
"""Adds all options of packing to a command, which receives them as `options: PackOptions`."""

pack_options_without_workers = option_group("options", [*_LIMITS, *_PLANNING, *_LOSS], as_usage(PackOptions))
"""The same for a command that has --workers already."""

# Options that a plan file replaces: the limits and the search.
REPLACED_BY_PLAN = ["capacity", "pairs_budget", "terms_budget", "balance", "token_pairs", "workers", "method", "effort"]
REPLACED_BY_PLAN += ["time_limit"]
