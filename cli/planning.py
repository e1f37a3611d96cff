"""The options by which rows are planned, and where `pack` takes its plan from."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from treepack.pack.plan.files import PlanFile
    from treepack.pack.plan.plan import Plan
    from treepack.pack.plan.problem import Limits, Search
    from treepack.trie.trie import Trie

F = TypeVar("F", bound=Callable[..., Any])

MOST_TOKENS, MOST_COUNTED = 2**31 - 1, 10**18  # as treepack.pack.plan.planning has them; importing that takes a second

LIMIT_OPTIONS = (
    click.option("--capacity", type=click.IntRange(1, MOST_TOKENS), metavar="N", help="Most tokens a row may hold."),
    click.option(
        "--pairs-budget", type=click.IntRange(1, MOST_COUNTED), metavar="N", help="Most attention score pairs of a row."
    ),
    click.option(
        "--terms-budget",
        type=click.IntRange(1, MOST_COUNTED),
        metavar="N",
        help="Most loss terms, trained tokens of single trajectories, of a row.",
    ),
    click.option(
        "--balance",
        type=click.IntRange(min=1),
        default=1,
        metavar="ROWS_MULTIPLE_OF",
        help="Make the rows of every training step a multiple of this number of ranks, even in score pairs.",
    ),
    click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Processes that plan."),
)


def search_options(effort: str) -> Callable[[F], F]:
    """Add the options that say how a plan is sought, with this default of `--effort`."""
    options = (
        click.option(
            "--method",
            type=click.Choice(
                ["auto", "contiguous", "heuristic", "single-path", "exact", "greedy-online", "sequence", "groups"]
            ),
            default="auto",
            show_default=True,
            help="How trajectories are put into rows; groups keeps each group in one row, as dpo needs it.",
        ),
        click.option(
            "--effort",
            type=click.Choice(["low", "normal", "high"]),
            default=effort,
            show_default=True,
            help="How much work a method that searches may do.",
        ),
        click.option(
            "--time-limit",
            type=click.FloatRange(min=0, min_open=True),
            metavar="SECONDS",
            callback=_finite,
            help="Most time per tree for a method that proves.",
        ),
    )

    def added(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return added


def _finite(context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is no number of seconds", context, option)
    return value


def limit_options(command: F) -> F:
    """Add the options that say what a plan must keep to."""
    for option in reversed(LIMIT_OPTIONS):
        command = option(command)
    return command


def read_search(values: dict[str, Any]) -> Search:
    """The search that the values of `search_options` ask for."""
    from treepack.pack.plan.problem import Search

    return Search(values["effort"], values["time_limit"])


def given_file(path: Path | None, values: dict[str, Any]) -> PlanFile | None:
    """The plan file at `path`, which must then be all that is said about planning; None without one.

    Raises:
        TreepackError: not a plan file.
        UsageError: neither a plan nor a capacity, or both.
    """
    from click.core import ParameterSource

    from treepack.pack.plan.files import read_plan_file

    if path is None:
        if values["capacity"] is None:
            raise click.UsageError("give --capacity, or a plan with --plan")
        return None
    context = click.get_current_context()
    for name in values:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--plan brings what --{name.replace('_', '-')} would say; leave one out")
    return read_plan_file(path)


def limits_of(given: PlanFile | None, values: dict[str, Any]) -> Limits:
    """The limits of the plan that is given or to be made."""
    from treepack.pack.plan.problem import Limits

    return given.limits if given else Limits(values["capacity"], values["pairs_budget"], values["terms_budget"])


def planned(trie: Trie, given: PlanFile | None, limits: Limits, values: dict[str, Any]) -> Plan:
    """The plan that is given, or one made as the values of all these options say."""
    from treepack.pack.plan.planning import plan_of_file, plan_rows

    if given:
        return plan_of_file(trie, given)
    return plan_rows(
        trie,
        capacity=limits,
        method=values["method"],
        search=read_search(values),
        multiple_of=values["balance"],
        workers=values["workers"],
    )


def refuse_file(path: Path | None, out: Path, inputs: list[Path], *, overwrite: bool) -> None:
    """Raise a TreepackError if a plan saved at `path` would be in the way of something.

    An existing plan is overwritten if asked, and nothing else ever is.
    """
    from treepack.errors import TreepackError
    from treepack.pack.plan.files import read_plan_file

    if path is None:
        return
    for directory in (out, *inputs):
        if path.resolve() == directory.resolve():
            raise TreepackError(f"{path} is what --out or an input names too; choose another --save-plan")
        if path.resolve().is_relative_to(directory.resolve()):
            raise TreepackError(f"{path} lies inside {directory}; choose another --save-plan")
    if path.exists():
        if not overwrite:
            raise TreepackError(f"{path} exists; choose another --save-plan or give --overwrite")
        try:
            read_plan_file(path)
        except TreepackError as error:
            raise TreepackError(f"{path} exists and is no plan; remove it or choose another --save-plan") from error
