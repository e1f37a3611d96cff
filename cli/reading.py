"""The options by which raw rollouts are read, for `build-trie`, `stats`, `show` and `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from treepack.ingest.options import EXPANSIONS, SHARES, BuildOptions

from .option_groups import option_group

USUAL = BuildOptions()


def _read_tools(context: click.Context, option: click.Parameter, path: str | None) -> list[dict[str, Any]] | None:
    return None if path is None else read_tools(path)


reading_options = option_group(
    "build",
    (
        click.option(
            "--format",
            metavar="NAME",
            default=USUAL.format,
            help="Format of the inputs, as treepack formats lists them; by default it is recognised by content.",
        ),
        click.option(
            "--tokenizer",
            metavar="NAME_OR_DIR",
            help="Hugging Face tokenizer whose chat template renders conversations.",
        ),
        click.option(
            "--tools",
            type=click.Path(exists=True, dir_okay=False),
            callback=_read_tools,
            help="JSON list of tool schemas for conversations that have none.",
        ),
        click.option(
            "--expand",
            type=click.Choice(EXPANSIONS),
            default=USUAL.expand,
            show_default=True,
            help="One sample per conversation, or one per assistant turn with the prompt rendered as it was then.",
        ),
        click.option(
            "--share",
            type=click.Choice([name for name in SHARES if name != "none"]),
            default=USUAL.share,
            show_default=True,
            help="Share prefixes between all trajectories, or only inside a group.",
        ),
        click.option("--reward-key", metavar="KEY", help="Key of the reward, if the reward is an object."),
        click.option(
            "--normalize-ids",
            is_flag=True,
            help="Number tool call ids, UUIDs and times of conversations, so that random ones do not split prefixes.",
        ),
        click.option("--train-all", is_flag=True, help="Train every token of token records that have no mask."),
        click.option(
            "--workers",
            type=click.IntRange(min=1),
            default=USUAL.workers,
            show_default=True,
            help="Processes that read and tokenise; the result is the same.",
        ),
    ),
    BuildOptions,
)
"""Adds the reading options to a command, which receives them as `build: BuildOptions`."""


def read_tools(path: str) -> list[dict[str, Any]]:
    """Return the tool schemas in a JSON file.

    Raises:
        TreepackError: the file is not a JSON list of objects.
    """
    import json

    from treepack.errors import TreepackError

    try:
        tools = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise TreepackError(f"{path}: is not JSON ({error}); expected a list of tool schemas") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise TreepackError(f"{path}: expected a JSON list of tool schemas")
    return tools
