"""Options of LoRA: a new adapter, the precision of its base, and the form of the output."""

from __future__ import annotations

from typing import Any

import click

from treepack.model.adapters.lora_options import LoraOptions

from .option_groups import as_usage, field_options, option_group


@as_usage
def _make(**values: Any) -> LoraOptions | None:
    """Return the options, None if all have their defaults: then the whole model is trained."""
    options = LoraOptions(**values)
    return None if options == LoraOptions() else options


lora_options = option_group(
    "lora",
    field_options(
        LoraOptions,
        rank={"name": "lora-rank"},
        alpha={"name": "lora-alpha", "type": click.FloatRange(min=0, min_open=True)},
        targets={"name": "lora-targets", "metavar": "auto|all-linear|NAME,NAME"},
        dropout={"name": "lora-dropout", "type": click.FloatRange(0, 1)},
    ),
    _make,
)
"""Adds the options to a command, which receives them as `lora: LoraOptions | None`."""
