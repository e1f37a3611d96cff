"""Options of LoRA: a new adapter, the precision of its base, and what is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .option_groups import as_usage, option_group

if TYPE_CHECKING:
    from treepack.model.adapters.adapter import LoraOptions


@as_usage
def _make(**options: Any) -> LoraOptions | None:
    """Return the options, None if all have their defaults: then the whole model is trained."""
    options = {name.removeprefix("lora_"): value for name, value in options.items()}
    if options == {"rank": None, "alpha": None, "targets": "auto", "dropout": 0.0, "quantize": None, "merge": False}:
        return None
    from treepack.model.adapters.adapter import LoraOptions

    return LoraOptions(**options)


quantize_option = click.option(
    "--quantize",
    type=click.Choice(["nf4"]),
    help="Round the linear layers of an adapter's base to 4 bits (needs bitsandbytes).",
)
lora_options = option_group(
    "lora",
    [
        click.option(
            "--lora-rank",
            type=click.IntRange(min=1),
            help="Train a LoRA adapter of this rank and nothing else (needs peft). An adapter as --model trains on "
            "without this option.",
        ),
        click.option(
            "--lora-alpha",
            type=click.FloatRange(min=0, min_open=True),
            help="Scale of the adapter times its rank; by default 32 for every rank.",
        ),
        click.option(
            "--lora-targets",
            default="auto",
            show_default=True,
            metavar="auto|all-linear|NAME,NAME",
            help="Linear layers with an adapter: auto is all except routers and the output layer, all-linear all "
            "except the output layer.",
        ),
        click.option(
            "--lora-dropout",
            type=click.FloatRange(0, 1),
            default=0.0,
            show_default=True,
            help="Only 0: a shared token has one hidden state for all branches.",
        ),
        quantize_option,
        click.option("--merge", is_flag=True, help="Write the whole model with the adapter added to its weights."),
    ],
    _make,
)
