"""Options of `treepack rollout` in groups: the shape of trees, the distribution, the limits of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from treepack.rollout.options import RolloutOptions, Sampling, TreeOptions, independent

from .choices import WordChoice
from .option_groups import as_usage, field_options, is_given, option_group

if TYPE_CHECKING:
    from treepack.rollout.options import RolloutOptions, Sampling

_SAMPLERS = ("independent", "treepo", "prefixes")
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
    repeats = values.pop("max_repeats")
    if sampler == "treepo":
        begin, end = values["branching_temperature"]
        if begin != end and values["depth"] is None:
            raise click.UsageError("--branching-temperature A-B changes over the depth of a tree; give --depth too")
        return sampler, TreeOptions(**values, max_repeats=8 if repeats is None else repeats)
    for name in _OF_TREES:
        if is_given(name):
            raise click.UsageError(f"--{name.replace('_', '-')} is an option of --sampler treepo; leave it out")
    kept = {name: value for name, value in values.items() if name not in _OF_TREES}
    return sampler, independent(**kept, max_repeats=repeats or 0)


tree_options = option_group(
    "tree",
    [
        click.option(
            "--sampler",
            type=WordChoice(_SAMPLERS),
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


sampling_options = option_group(
    "sampling",
    field_options(
        Sampling,
        top_k={"type": click.IntRange(min=0)},
        stop_token_ids={
            "name": "stop-token-id",
            "type": click.IntRange(min=0),
            "multiple": True,
            "show_default": False,
        },
    ),
    as_usage(Sampling),
)
run_options = option_group(
    "run",
    field_options(
        RolloutOptions, max_queries={"name": "queries"}, timeout={"type": click.FloatRange(min=0, min_open=True)}
    ),
    as_usage(RolloutOptions),
)
