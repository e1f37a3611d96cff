"""Options of commands that run a model: the implementation of attention, and the device."""

from __future__ import annotations

import click

ATTENTION = ("auto", "reference", "flex", "flash", "triton")

attention_option = click.option(
    "--attention", type=click.Choice(ATTENTION), default="auto", show_default=True, help="As in treepack train."
)
device_option = click.option(
    "--device", default="auto", show_default=True, help="cpu, cuda or cuda:N; auto is a GPU if there is one."
)
