"""Options of commands that run a model: the precision, the implementation of attention, and the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

ATTENTION = ("auto", "reference", "flex", "flash", "triton")

attention_option = click.option(
    "--attention", type=click.Choice(ATTENTION), default="auto", show_default=True, help="As in treepack train."
)
device_option = click.option(
    "--device", default="auto", show_default=True, help="cpu, cuda or cuda:N; auto is a GPU if there is one."
)


def dtype_option(text: str) -> Callable[[Any], Any]:
    """Return the option --dtype with its help."""
    choices = click.Choice(["auto", "fp32", "bf16"])
    return click.option("--dtype", type=choices, default="auto", show_default=True, help=text)
