"""Options of LoRA: a new adapter, the precision of its base, and the form of the output. This file imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec

from treepack.errors import TreepackError, install_hint
from treepack.option_fields import check_options, option

_DEFAULT_ALPHA = 32.0  # for every rank, as in "LoRA Without Regret" (Schulman et al., 2025): the rate fits every rank


@dataclass(frozen=True)
class LoraOptions:
    """An adapter to train, and its base."""

    # None continues with the adapter that the model's directory contains.
    rank: int | None = option(
        None,
        "Train a LoRA adapter of this rank and nothing else (needs peft). If --model is an adapter, omit this option "
        "to continue training it.",
        minimum=1,
    )
    alpha: float | None = option(None, "Scale of the adapter times its rank; by default 32 for every rank.")
    # Names of linear layers and stacked weights of experts, separated by commas, or one of two words.
    targets: str = option(
        "auto",
        "Layers with an adapter: auto is all linear layers and experts except routers and the output layer, all-linear "
        "all except the output layer.",
    )
    dropout: float = option(0.0, "Only 0: a shared token has one hidden state for all branches.")
    quantize: str | None = option(
        None, "Round the linear layers of an adapter's base to 4 bits (needs bitsandbytes).", choices=("nf4",)
    )
    merge: bool = option(False, "Write the whole model with the adapter added to its weights.")

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        check_options(self)
        if self.alpha is not None and not (math.isfinite(self.alpha) and self.alpha > 0):
            raise TreepackError(f"lora_alpha is {self.alpha}; expected a positive number")
        if self.rank is None and (self.alpha is not None or self.targets != "auto"):
            raise TreepackError("lora_alpha and lora_targets are about a new adapter; give lora_rank too")
        if self.dropout:
            raise TreepackError(
                f"lora_dropout is {self.dropout:g}, but a token shared by branches has one hidden state for all of "
                "them, so no branch can drop numbers of its own; leave it at 0"
            )
        if self.merge and self.quantize:
            raise TreepackError(
                "merge is not possible over a base of 4 bits: rounding the sum to 4 bits again would lose the adapter, "
                "and the base before rounding is not the base that it was trained on; keep base and adapter"
            )

    @property
    def scale_alpha(self) -> float:
        """The numerator of the scale."""
        return _DEFAULT_ALPHA if self.alpha is None else self.alpha


def require_packages(*, quantize: bool) -> None:
    """Refuse adapters, or bases of 4 bits, if their package is not installed.

    Raises:
        TreepackError: with the command that installs it.
    """
    needs = [("peft", "LoRA", "lora"), *([("bitsandbytes", "quantize", "bitsandbytes")] if quantize else [])]
    for package, name, extra in needs:
        if find_spec(package) is None:
            raise TreepackError(f"{name} needs {package}, which is not installed; {install_hint(extra)}")
