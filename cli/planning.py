"""The options by which rows are planned, for `pack`, `stats` and `report`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from treepack.pack.options import (
    EFFORTS,
    MAX_BUDGET,
    METHODS,
    NORMALIZE,
    SEMANTICS,
    TOO_LONG,
    PackOptions,
)

from .option_groups import as_usage, option_group
from .sizes import TokenCount

F = TypeVar("F", bound=Callable[..., Any])

USUAL = PackOptions()


def _finite(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is no number of seconds", context, option)
    return value


def _token_pairs(_: click.Context, __: click.Parameter, model: str | None) -> int:
    if model is None:
        return USUAL.token_pairs
    from treepack.costs.model_cost import pairs_of_token, read_shape

    return pairs_of_token(read_shape(model))


LIMITS = (
    click.option(
        "--capacity",
        type=TokenCount(),
        metavar="N",
        help="Maximum number of tokens in a row, for example 8192 or 8k; default: 16k or 64k if every trajectory fits, "
        "else the next power of two that they fit.",
    ),
    click.option(
        "--pairs-budget",
        type=click.IntRange(1, MAX_BUDGET),
        metavar="N",
        help="Maximum number of attention score pairs in a row.",
    ),
    click.option(
        "--terms-budget",
        type=click.IntRange(1, MAX_BUDGET),
        metavar="N",
        help="Maximum number of loss terms (trained tokens of single trajectories) in a row.",
    ),
    click.option(
        "--balance",
        type=click.IntRange(min=1),
        default=USUAL.balance,
        metavar="ROWS_MULTIPLE_OF",
        help="Make the rows of every training step a multiple of this number of ranks, with even score pairs.",
    ),
    click.option(
        "--balance-model",
        "token_pairs",
        metavar="MODEL",
        callback=_token_pairs,
        help="With --balance: make the rows even in the time of this model instead, a preset or a config.json as for "
        "the forecast of stats.",
    ),
)

WORKERS = click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=USUAL.workers,
    show_default=True,
    help="Processes that plan; the plan is the same.",
)

LOSS = (
    click.option(
        "--too-long",
        type=click.Choice(TOO_LONG),
        default=USUAL.too_long,
        show_default=True,
        help="How to treat a trajectory longer than the capacity. Memory is no reason to drop or truncate it: raise "
        "the capacity, and train with --carry auto.",
    ),
    click.option(
        "--semantics",
        type=click.Choice(SEMANTICS),
        default=USUAL.semantics,
        show_default=True,
        help="A shared trained token counts for every trajectory, or once.",
    ),
    click.option(
        "--normalize",
        type=click.Choice(NORMALIZE),
        default=USUAL.normalize,
        show_default=True,
        help="Units with equal weight in the mean loss: tokens, trajectories or groups.",
    ),
    click.option(
        "--leaf-weights",
        is_flag=True,
        help="Multiply trajectory weights by the leaf weights of sampled trees, which makes the gradient unbiased, and "
        "leave out the leaves that a fallback added.",
    ),
    click.option(
        "--fallback-leaves",
        is_flag=True,
        help="With --leaf-weights: keep these leaves, with the weights of all leaves, and a part of the bias.",
    ),
)


def _search(effort: str) -> tuple[Callable[[F], F], ...]:
    return (
        click.option(
            "--method",
            type=click.Choice(METHODS),
            default=USUAL.method,
            show_default=True,
            help="How trajectories are put into rows; groups keeps each group in one row, as dpo needs it.",
        ),
        click.option(
            "--effort",
            type=click.Choice(EFFORTS),
            default=effort,
            show_default=True,
            help="How much work a method that searches may do; below high, auto stops within 0.1 % of the bound.",
        ),
        click.option(
            "--time-limit",
            type=click.FloatRange(min=0, min_open=True),
            metavar="SECONDS",
            callback=_finite,
            help="Maximum time per tree for a method that proves its plan optimal.",
        ),
    )


def search_options(effort: str) -> Callable[[F], F]:
    """Add the options of a search to a command, which receives them as `search: PackOptions`."""
    return option_group("search", _search(effort), as_usage(PackOptions))


pack_options = option_group("options", (*LIMITS, WORKERS, *_search(USUAL.effort), *LOSS), as_usage(PackOptions))
"""Adds all options of packing to a command, which receives them as `options: PackOptions`."""

pack_options_without_workers = option_group("options", (*LIMITS, *_search(USUAL.effort), *LOSS), as_usage(PackOptions))
"""The same for a command that has --workers already."""

# Options that a plan file replaces: the limits and the search.
REPLACED_BY_PLAN = ["capacity", "pairs_budget", "terms_budget", "balance", "token_pairs", "workers", "method", "effort"]
REPLACED_BY_PLAN += ["time_limit"]
