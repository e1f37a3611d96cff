"""Computations with the output layer, inside the forward pass of a causal language model of transformers.

    with head_replaced(causal, compute) as call:
        output = model(...)          model: `causal`, or wrappers of a trainer around it
    call.result                      compute(states [B * T, D], OutputLayer), in place of the logits [B, T, V]

During the block the output layer calls `compute` and returns the logits of the last token only. Wrappers see an
ordinary call of the module: FSDP and ZeRO-3 gather its weights before it. Hooks on its output gather the weights for
the backward pass. `compute` uses the weights in chunks, so the logits of all tokens never exist together.

A model may change its logits after the output layer. `measure_logit_map` finds the change without reading the code: the
output layer returns known numbers, and the model returns logits that it computes from them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import disable

from treepack.data.ragged_tensor import RaggedTensor
from treepack.errors import TreepackError
from treepack.model.head.logit_map import LogitMap, OutputLayer

# Maximum relative difference between the logits that a model and its `LogitMap` make of known numbers, if the
# model computes them in float32 or float64. In bfloat16 and float16 the rounding of the model is larger.
_MAP_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_LARGEST = 200.0  # of the known numbers: far beyond every cap in use, which are 15 to 50
_SMALL = 2.0**-20  # tanh(x) is x at this distance from 0, to 1e-12
_HUGE = 2.0**14  # tanh(x / cap) is 1 here; float16 reaches 2**16

# How each model changes its logits. Weak, so that a model can be freed.
_MAPS: weakref.WeakKeyDictionary[nn.Module, LogitMap] = weakref.WeakKeyDictionary()


@dataclass
class HeadCall:
    """The call of a replaced output layer: the result of `compute`, and the states [B, T, D] that the layer got."""

    result: Any = None
    states: list[Tensor] = field(default_factory=list)


def find_head(causal: Any) -> nn.Linear:
    """Return the output layer of a causal model.

    Raises:
        TreepackError: if it is not a plain linear layer.
    """
    head = causal.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise TreepackError(
            f"{type(causal).__name__}: its output layer is a {type(head).__module__}.{type(head).__name__}; expected a "
            "plain torch.nn.Linear, so do not put an adapter on it"
        )
    return head


def check_sets(kept: RaggedTensor | None, causal: Any, source: str) -> None:
    """Refuse kept sets with ids that the output layer of a model does not have; waits for a GPU if they are there.

    Raises:
        TreepackError: naming `source` and the id.
    """
    size = getattr(causal.get_output_embeddings(), "out_features", None)
    if kept is None or size is None or not len(kept.values) or (last := int(kept.values.max())) < size:
        return
    raise TreepackError(
        f"{source}: its vocabulary ends at {size - 1}, but a kept set has the token id {last}; train the model that "
        "sampled the rollouts"
    )


@contextmanager
def head_replaced(
    causal: Any, compute: Callable[[Tensor, OutputLayer], Any], *, known: bool = False
) -> Iterator[HeadCall]:
    """Let the output layer of `causal` call `compute` during the block.

    The layer must run exactly once in the block, on the states of all tokens: pass no logits_to_keep to the model.

    Args:
        causal: a causal language model of transformers.
        compute: gets the hidden states [B * T, D] and the output layer.
        known: whether the layer returns `_known_logits` for the last token, instead of the logits that it computes.

    Raises:
        TreepackError: if the output layer is not a plain linear layer, does not run once, or is not whole when it runs.
    """
    head, call = find_head(causal), HeadCall()
    own = head.__dict__.get("forward")  # a forward of this instance, which a library has put there
    original = head.forward

    # Chunks, checkpoints and an autograd function: a compiled model breaks its graph here.
    @disable  # type: ignore[untyped-decorator]
    def forward(states: Tensor) -> Tensor:
        _check_whole(causal, head, states)
        call.states.append(states)
        # [B, T, D] -> [B * T, D]
        call.result = compute(states.flatten(0, -2), OutputLayer(head.weight, head.bias, logit_map_of(causal)))
        last: Tensor = original(states[:, -1:])
        if not known:
            return last
        # Numbers in float64, so that they can be compared exactly; still attached to the model.
        # Rows of the weight may be sharded, but `out_features` is the number of words.
        return torch.where(last == last, 0.0 * last, 0).double() + _known_logits(head.out_features, last.device)

    head.forward = forward  # type: ignore[method-assign]
    try:
        yield call
    finally:
        del head.forward
        if own is not None:
            head.forward = own  # type: ignore[method-assign]
    if len(call.states) != 1:
        raise TreepackError(
            f"{type(causal).__name__}: its forward pass runs its output layer {len(call.states)} times, but must run "
            "it once; train another model"
        )


def _check_whole(causal: Any, head: nn.Linear, states: Tensor) -> None:
    """Refuse an output layer that is sharded or quantised while it runs."""
    # Tensor parallelism leaves a DTensor; a quantised weight has another shape.
    if type(head.weight.data) is not Tensor or head.weight.shape[1:] != states.shape[-1:]:
        raise TreepackError(
            f"{type(causal).__name__}: the weights of its output layer are sharded or quantised while it runs; keep it "
            "whole, without tensor parallelism and quantisation"
        )


def logit_map_of(causal: nn.Module) -> LogitMap:
    """Return the measured change that the model makes to its output layer's result; the identity before that."""
    return _MAPS.get(causal, LogitMap())


def _known_logits(vocabulary: int, device: torch.device) -> Tensor:
    """Return the numbers [vocabulary] that the output layer returns for a measurement, float64."""
    # Symmetric around 0 and not in order, so that a change by index is found too: strides of a prime cover all indices.
    spread = torch.linspace(-_LARGEST, _LARGEST, vocabulary, dtype=torch.float64, device=device)
    values = spread[torch.arange(vocabulary, device=device) * 7919 % vocabulary]
    # The first numbers measure the slope at 0 and the limit at infinity.
    values[: min(4, vocabulary)] = torch.tensor([_SMALL, _HUGE, -_SMALL, -_HUGE], device=device)[:vocabulary]
    return values


def measure_logit_map(causal: nn.Module, logits: Tensor, *, source: str) -> None:
    """Find the `LogitMap` that turned `_known_logits` into `logits` [B, 1, V], and remember it for the model.

    Raises:
        TreepackError: if a scale and a soft cap do not explain the logits.
    """
    after = logits[0, -1].detach().double()
    before = _known_logits(len(after), after.device)
    scale = float(after[0]) / _SMALL
    limit = float(after[1])
    # A linear map keeps the ratio of two numbers; a cap does not let the larger one through.
    is_linear = abs(limit / _HUGE - scale) <= 1e-3 * abs(scale)
    # A dtype that the model computed in rounds the measured numbers. Powers of two are exact, so they have no error.
    found = LogitMap(scale, None if is_linear else limit)
    tolerance = _MAP_TOLERANCE.get(logits.dtype, _MAP_TOLERANCE[torch.float32])
    # "not error <=" instead of "error >": a NaN must fail.
    if scale == 0 or not bool(((found(before) - after).abs() <= tolerance * after.abs().clamp(min=_SMALL)).all()):
        raise TreepackError(
            f"{source}: its logits are not its output layer of the hidden states, nor these with a scale and a soft "
            "cap; treepack computes no other logits, so train another model"
        )
    _MAPS[causal] = found
