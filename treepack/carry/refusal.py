"""Models whose rows cannot run in pieces, refused by name before the first step."""

from __future__ import annotations

from typing import Any

from treepack.errors import TreepackError
from treepack.model.compatibility import count_recurrent_layers
from treepack.model.loaded import LoadedModel

_REMEDY = "run this model without --carry"


def check_carry(loaded: LoadedModel) -> None:
    """Refuse a model, or its attention, that cannot run rows in pieces.

    Raises:
        TreepackError: naming the reason.
    """
    for reason in (_architecture(loaded.causal.config.get_text_config()), _attention(loaded.attention)):
        if reason is not None:
            raise TreepackError(f"{loaded.source}: --carry cannot cut its rows into pieces, because {reason}")


def _architecture(config: Any) -> str | None:
    """Return why a model of that configuration needs whole rows, and the remedy; None if it does not."""
    with_convolution, with_scan = count_recurrent_layers(config)
    if with_scan:
        return f"the states of its {with_scan} recurrent layers would not reach the next piece; {_REMEDY}"
    if with_convolution:
        return f"the inputs of its {with_convolution} short convolutions would not reach the next piece; {_REMEDY}"
    return None


def _attention(name: str) -> str | None:
    """Return why an implementation of attention computes only whole rows, and the remedy; None if it does not."""
    if name == "flash":
        return "flash computes as many queries as keys; give --attention triton or flex"
    return None
