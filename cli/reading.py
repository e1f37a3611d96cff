"""The options by which raw rollouts are read, for `build-trie`, `stats`, `show` and `report`."""

from __future__ import annotations

import click

from treepack.ingest.options import CONTROL_TOKENS, EXPANSIONS, SHARES, TRUNCATED, BuildOptions

from .option_groups import as_usage, option_group
from .sizes import Size

USUAL = BuildOptions()


# Of every command that renders conversations.
CHAT_TEMPLATE = click.option(
    "--chat-template",
    type=click.Path(exists=True, dir_okay=False),
    help="File with a chat template in Jinja, which replaces the template of the tokenizer.",
)
TOOLS = click.option(
    "--tools",
    type=click.Path(exists=True, dir_okay=False),
    help="JSON list of tool schemas for conversations that have none.",
)

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
            "--columns",
            metavar="FILE|KEY=PATH,...",
            help="Where the parts of a rollout are in records of another layout, for example "
            "question=ask,answer=tries[].text,reward=tries[].ok; keys and paths are in docs/inputs.md.",
        ),
        click.option(
            "--tokenizer",
            metavar="NAME_OR_DIR",
            help="Hugging Face tokenizer whose chat template renders conversations.",
        ),
        CHAT_TEMPLATE,
        TOOLS,
        click.option(
            "--expand",
            type=click.Choice(EXPANSIONS),
            default=USUAL.expand,
            show_default=True,
            help="One sample per conversation, or one per assistant turn with the prompt rendered as it was then.",
        ),
        click.option(
            "--per-path",
            is_flag=True,
            help="With --expand turns: a turn on several paths of a search tree becomes one sample for each path.",
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
            "--control-tokens",
            type=click.Choice(CONTROL_TOKENS),
            default=USUAL.control_tokens,
            show_default=True,
            help="Special tokens that messages spell out: keep them as an engine does, tokenise them as ordinary text, "
            "or skip the conversation.",
        ),
        click.option(
            "--truncated",
            type=click.Choice(TRUNCATED),
            default=USUAL.truncated,
            show_default=True,
            help="Rollouts whose last answer was cut: keep trains them without an end token, drop masks their loss and "
            "keeps their reward in the baseline of the group.",
        ),
        click.option("--strict", is_flag=True, help="Refuse the first rollout that would be skipped."),
        click.option(
            "--skip-bad", is_flag=True, help="Skip and count damaged records and files, which are refused otherwise."
        ),
        click.option(
            "--max-record-size",
            type=Size(),
            default="1G",
            show_default=True,
            help="Maximum size of a line, and of a file that is read as a whole, decompressed; suffixes K, M and G.",
        ),
        click.option(
            "--workers",
            type=click.IntRange(min=1),
            default=USUAL.workers,
            show_default=True,
            help="Processes that read, tokenise, sort and write; the result is the same. They start if there are at "
            "least 32 MB of token ids, or any text to tokenise.",
        ),
    ),
    as_usage(BuildOptions),
)
"""Adds the reading options to a command, which receives them as `build: BuildOptions`."""
