"""Observation of a forward pass of a causal language model: its hidden states and its calls of attention.

    with observe(causal) as seen:
        seen.logits = model(..., record=seen.attention).logits      model: `causal`, or a wrapper of a trainer around it
    seen.states           [B, T, D], the input of the output layer
    check_observed_attention    every layer that mixes tokens called a function on trees
    measure_logit_map     how the model changes the result of its output layer (`head`)

The two checks need no second forward pass, so they work at any precision. `probe` compares two forward passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from treepack.attention.interface import AttentionCall
from treepack.errors import MODELS_HINT, TreepackError
from treepack.model.accept.compatibility import NOT_PASSED_ON, OWN_STATE, count_attention_layers, count_recurrent_layers
from treepack.model.foreign_errors import NO_INTERFACE
from treepack.model.head.output_head import HeadCall, head_replaced
from treepack.recurrent.entry import upgrade_hint
from treepack.recurrent.interface import CONVOLUTION, RecurrentCall


class _AttentionRecord:
    """The calls of attention in one forward pass.

    This is not a list, because wrappers of trainers copy the lists that they pass on.
    """

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.recurrent: list[RecurrentCall] = []

    def append(self, call: AttentionCall | RecurrentCall) -> None:
        """Add a call; `attention.interface` and `recurrent.interface` do so."""
        if isinstance(call, RecurrentCall):
            self.recurrent.append(call)
        else:
            self.calls.append(call)


@dataclass
class ForwardObservation:
    """The output layer's call in one forward pass, the calls of attention, and the logits [B, 1, V] of the last token.

    The model makes the logits from `known_logits`.
    """

    head: HeadCall
    attention: _AttentionRecord = field(default_factory=_AttentionRecord)
    logits: Tensor | None = None

    @property
    def states(self) -> Tensor:
        """Hidden states [B, T, D], the input of the output layer."""
        return self.head.states[-1]


@contextmanager
def observe(causal: Any) -> Iterator[ForwardObservation]:
    """Record the forward pass that runs inside the block, without gradients.

    Args:
        causal: a causal language model of transformers.

    Raises:
        TreepackError: if the block does not run the output layer once.
    """
    with torch.no_grad(), head_replaced(causal, lambda *_: None, known=True) as call:
        yield ForwardObservation(call)


def check_observed_attention(seen: ForwardObservation, causal: Any, *, source: str) -> None:
    """Refuse a model unless each of its layers that mix tokens called a function on trees.

    Raises:
        TreepackError: if none was called, or the calls do not match the layers.
    """
    calls, config = seen.attention.calls, causal.config.get_text_config()
    layers, recurrent = count_attention_layers(config), count_recurrent_layers(config)
    if not calls and not seen.attention.recurrent:
        # transformers marks models whose caches hold a state.
        own = OWN_STATE if getattr(causal, "_is_stateful", False) else NO_INTERFACE
        fault = f"{NOT_PASSED_ON}; {upgrade_hint() or MODELS_HINT}" if any(recurrent) else f"{own}; {MODELS_HINT}"
        raise TreepackError(f"{source}: {fault}")
    # Fewer modules than layers: a layer mixes tokens by other means. A module may call twice, as in DiffLlama.
    modules = {call.module for call in calls}
    if len(modules) != layers:
        raise TreepackError(
            f"{source}: its {layers} attention layers call attention {len(calls)} times, from {len(modules)} modules, "
            f"so that some of them may mix tokens in another way; {MODELS_HINT}"
        )
    # A layer may have a convolution each for queries, keys and values. It has one scan.
    names = [call.name for call in seen.attention.recurrent]
    convolutions = names.count(CONVOLUTION)
    scans = len(names) - convolutions
    with_convolution, with_scan = recurrent
    if convolutions < with_convolution or convolutions % max(with_convolution, 1) or scans != with_scan:
        raise TreepackError(
            f"{source}: its {with_convolution} recurrent layers, {with_scan} of them with a scan, call a convolution "
            f"{convolutions} times and a scan {scans} times, so that some of them may mix tokens in another way; "
            f"{upgrade_hint() or MODELS_HINT}"
        )
