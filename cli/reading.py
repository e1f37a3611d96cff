"""The options by which raw rollouts are read, shared by `build-trie` and `stats`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from treepack.ingest.stream import Reading

F = TypeVar("F", bound=Callable[..., Any])


def reading_options(command: F) -> F:
    """Add the reading options to a click command."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


OPTIONS = (
    click.option(
        "--format",
        "format_name",
        metavar="NAME",
        default="auto",
        help="Format of the inputs, as treepack formats lists them; by default it is recognised by content.",
    ),
    click.option(
        "--tokenizer", metavar="NAME_OR_DIR", help="Hugging Face tokenizer whose chat template renders conversations."
    ),
    click.option(
        "--tools",
        type=click.Path(exists=True, dir_okay=False),
        help="JSON list of tool schemas for conversations that bring none.",
    ),
    click.option(
        "--expand",
        type=click.Choice(["trajectory", "turns"]),
        default="trajectory",
        show_default=True,
        help="One sample per conversation, or one per assistant turn as the template renders it then.",
    ),
    click.option(
        "--share",
        type=click.Choice(["all", "group"]),
        default="all",
        show_default=True,
        help="Share prefixes between all trajectories, or only inside a group.",
    ),
    click.option("--reward-key", metavar="KEY", help="Key of the reward where it is an object."),
    click.option(
        "--normalize-ids",
        is_flag=True,
        help="Number tool call ids, UUIDs and times of conversations anew, so that random ones do not part prefixes.",
    ),
    click.option("--train-all", is_flag=True, help="Train every token of token records that carry no mask."),
    click.option(
        "--workers",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="Processes that read and tokenise; the result is the same.",
    ),
)


def read_options(values: dict[str, Any], *, shapes: bool = False) -> Reading:
    """Reading from the values of `reading_options`; with `shapes` also of inputs that hold lengths only."""
    from treepack.ingest.stream import Reading

    return Reading(
        format=values["format_name"],
        tokenizer=values["tokenizer"],
        tools=load_tools(values["tools"]),
        expand=values["expand"],
        reward_key=values["reward_key"],
        train_all=values["train_all"],
        shapes=shapes,
        normalize_ids=values["normalize_ids"],
        workers=values["workers"],
    )


def load_tools(path: str | None) -> list[dict[str, Any]] | None:
    """The tool schemas in a JSON file.

    Raises:
        TreepackError: not a JSON list of objects.
    """
    import json

    from treepack.errors import TreepackError

    if path is None:
        return None
    try:
        tools = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise TreepackError(f"{path}: is not JSON ({error}); expected a list of tool schemas") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise TreepackError(f"{path}: expected a JSON list of tool schemas")
    return tools
