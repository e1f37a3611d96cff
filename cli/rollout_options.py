"""Options of `treepack rollout` in groups: the shape of trees, the distribution, the limits of a run.

The values of sampling and of a run are copies of the library's defaults, because a help page must not import numpy; a
test compares them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from treepack.rollout.options import TreeOptions, independent

from .choices import WordChoice
from .option_groups import as_usage, field_options, option_group

if TYPE_CHECKING:
    from treepack.rollout.engine import Sampling
    from treepack.rollout.run import RolloutOptions

SAMPLERS = ("independent", "treepo", "prefixes")
# Options of trees, which sampling without forks does not have.
_OF_TREES = ("segment", "first_forks", "branches", "branching", "branching_temperature", "fallback")


class _Bounds(click.ParamType[Any]):
    """A number, or two numbers with a hyphen between them."""

    name = "N|A-B"

    def __init__(self, kind: type[int] | type[float]) -> None:
        self.kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse "2" or "2-8"; wrong usage for anything else."""
        if not isinstance(value, str):
            return value
        try:
            numbers = [self.kind(part) for part in value.split("-", 1)]
        except ValueError:
            self.fail(f"{value!r} is neither a number nor two numbers such as 2-8", param, ctx)
        return (numbers[0], numbers[-1])


class _Segment(click.ParamType[Any]):
    """A number of tokens, or the word turn."""

    name = "N|turn"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse "512" or "turn", which is returned as None."""
        if value is None or isinstance(value, int) or value == "turn":
            return None if value == "turn" else value
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number of tokens nor turn", param, ctx)


def _make_tree(sampler: str, **values: Any) -> tuple[str, TreeOptions]:
    """Return the sampler's name and the options of its trees.

    Raises:
        UsageError: an option that the sampler does not have.
        TreepackError: a value that makes no sense.
    """
    context = click.get_current_context()
    repeats = values.pop("max_repeats")
    if sampler == "treepo":
        begin, end = values["branching_temperature"]
        if begin != end and values["depth"] is None:
            raise click.UsageError("--branching-temperature A-B changes over the depth of a tree; give --depth too")
        return sampler, TreeOptions(**values, max_repeats=8 if repeats is None else repeats)
    for name in _OF_TREES:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} is an option of --sampler treepo; leave it out")
    kept = {name: value for name, value in values.items() if name not in _OF_TREES}
    return sampler, independent(**kept, max_repeats=repeats or 0)


tree_options = option_group(
    "tree",
    [
        click.option(
            "--sampler",
            type=WordChoice(SAMPLERS),
            required=True,
            help="independent: rollouts one by one. treepo: trees of segments. prefixes: continuations of the prompts "
            "and prefixes that treepack allocate, augment and select write.",
        ),
        *field_options(
            TreeOptions,
            "width max_tokens depth segment first_forks branches branching branching_temperature fallback max_repeats",
            segment={"type": _Segment()},
            depth={"default": None, "show_default": False},
            first_forks={"type": _Bounds(int), "default": "2"},
            branching_temperature={"type": _Bounds(float), "default": "2"},
            max_repeats={"type": click.IntRange(min=0), "default": None, "show_default": "8 for treepo, else 0"},
        ),
    ],
    as_usage(_make_tree),
)


def _make_sampling(stop_token_id: tuple[int, ...], **values: Any) -> Sampling:
    from treepack.rollout.engine import Sampling

    return Sampling(**values, stop_token_ids=stop_token_id)


sampling_options = option_group(
    "sampling",
    [
        click.option("--temperature", type=float, default=1.0, show_default=True, help="Temperature of the sampling."),
        click.option(
            "--top-p", type=float, default=1.0, show_default=True, help="Share of probability that is kept; 1 for all."
        ),
        click.option(
            "--top-k", type=click.IntRange(min=0), default=0, show_default=True, help="Tokens kept; 0 for all."
        ),
        click.option(
            "--stop-token-id",
            type=click.IntRange(min=0),
            multiple=True,
            help="Token that ends a turn; may be repeated. Default: the ends of sequence of the model.",
        ),
    ],
    as_usage(_make_sampling),
)


def _make_run(queries: int, **values: Any) -> RolloutOptions:
    from treepack.rollout.run import RolloutOptions

    return RolloutOptions(**values, max_queries=queries)


run_options = option_group(
    "run",
    [
        click.option(
            "--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Seed of all choices."
        ),
        click.option(
            "--concurrency",
            type=click.IntRange(min=1),
            default=64,
            show_default=True,
            help="Maximum requests to the engine at a time.",
        ),
        click.option(
            "--queries",
            type=click.IntRange(min=1),
            default=32,
            show_default=True,
            help="Maximum queries in work at a time.",
        ),
        click.option(
            "--timeout",
            type=click.FloatRange(min=0, min_open=True),
            default=600.0,
            show_default=True,
            help="Seconds that an attempt of a request may take.",
        ),
        click.option(
            "--attempts",
            type=click.IntRange(min=1),
            default=5,
            show_default=True,
            help="Attempts of a request that fails for now.",
        ),
        click.option(
            "--resume", is_flag=True, help="Continue an existing --out: its finished trees are not sampled again."
        ),
    ],
    as_usage(_make_run),
)
