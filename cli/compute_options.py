"""Options of commands that run a model: the precision, the implementation of attention, and the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from .sizes import PassSize

ATTENTION = ("auto", "reference", "flex", "flash", "triton")

attention_option = click.option(
    "--attention", type=click.Choice(ATTENTION), default="auto", show_default=True, help="As in treepack train."
)
device_option = click.option(
    "--device", default="auto", show_default=True, help="cpu, cuda or cuda:N; auto is a GPU if there is one."
)


pass_tokens_option = click.option(
    "--pass-tokens",
    type=PassSize(),
    default="auto",
    show_default=True,
    metavar="N|auto",
    help="Join consecutive rows into passes of at most N tokens, which are faster on a GPU; auto is 32768 there, and 1 "
    "runs every row alone, as auto does on the CPU.",
)


def dtype_option(text: str) -> Callable[[Any], Any]:
    """Return the option --dtype with its help."""
    choices = click.Choice(["auto", "fp32", "bf16"])
    return click.option("--dtype", type=choices, default="auto", show_default=True, help=text)
