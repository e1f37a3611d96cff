"""Observation of a forward pass of a causal language model: its hidden states, its calls of output layer and attention.

    with observe(causal) as seen:
        logits = model(..., record=seen.attention).logits      model: `causal`, or a wrapper of a trainer around it
    seen.states         [B, T, D], after the final norm
    check_attention     every layer called tree attention exactly once
    check_logits        the logits are the output layer of these states and nothing else

The two checks need no second forward pass, so they work at any precision, and also if weights are sharded. `probe`
compares two forward passes, and needs the whole weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from treepack.attention.interface import AttentionCall
from treepack.errors import TreepackError
from treepack.model.compatibility import NO_INTERFACE, REQUIREMENT


class AttentionRecord:
    """The calls of attention in one forward pass.

    Wrappers of trainers copy lists that they pass on, so this is no list.
    """

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def append(self, call: AttentionCall) -> None:
        """Add a call; `attention.interface` does so."""
        self.calls.append(call)


@dataclass
class Observation:
    """Outputs of the modules of a model in one forward pass, and its calls of attention."""

    outputs: list[Tensor] = field(default_factory=list)
    heads: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # input and output, each for the last token
    attention: AttentionRecord = field(default_factory=AttentionRecord)
    logits: Tensor | None = None

    @property
    def states(self) -> Tensor:
        """Hidden states [B, T, D] after the final norm."""
        return self.outputs[-1]


@contextmanager
def observe(causal: Any, *, source: str, heads: bool = True) -> Iterator[Observation]:
    """Record the forward pass that runs inside the block; the hooks are gone at its end.

    Args:
        causal: a causal language model of transformers.
        source: the model's name in error messages.
        heads: record calls of the output layer too.

    Raises:
        TreepackError: if the block ends without hidden states, because the model has no module that returns them.
    """
    seen = Observation()
    head = causal.get_output_embeddings()
    hooks = [module.register_forward_hook(lambda _, __, out: seen.outputs.append(out[0])) for module in _bodies(causal)]
    if heads:
        # Only the last token. A copy, because a model may scale its logits in place.
        hooks.append(head.register_forward_hook(lambda _, args, out: seen.heads.append((_last(args[0]), _last(out)))))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
    if not seen.outputs:
        raise TreepackError(
            f"{source}: its hidden states cannot be separated from its output layer; {REQUIREMENT} and one output layer"
        )


def _bodies(causal: Any) -> list[nn.Module]:
    """Return the modules that may return the hidden states, the innermost one first.

    Most causal classes call `base_model`. That of OPT calls base_model.decoder instead, which `get_decoder` returns.
    If both run, base_model finishes last, and the last record counts.
    """
    candidates = [causal.get_decoder(), causal.base_model]
    return [body for i, body in enumerate(candidates) if body is not causal and body not in candidates[:i]]


def check_attention(seen: Observation, causal: Any, *, source: str) -> None:
    """Refuse a model unless each of its layers called tree attention exactly once.

    Raises:
        TreepackError: if attention was never called, or the calls do not match the layers.
    """
    calls = seen.attention.calls
    layers = causal.config.get_text_config().num_hidden_layers
    if not calls:
        raise TreepackError(f"{source}: {NO_INTERFACE}; {REQUIREMENT}")
    # Fewer calls than layers: a layer mixes tokens by other means. Fewer modules than calls: one of them attends twice.
    modules = {call.module for call in calls}
    if len(calls) != layers or len(modules) != layers:
        raise TreepackError(
            f"{source}: its {layers} layers call attention {len(calls)} times, from {len(modules)} modules; "
            f"{REQUIREMENT}"
        )


def check_logits(seen: Observation, logits: Tensor, head: Any, tolerance: float, *, source: str) -> None:
    """Refuse a model whose logits are anything else than the output layer of its hidden states.

    Args:
        seen: the forward pass.
        logits: [B, n, V], of the last n tokens; only the last token is compared.
        head: the output layer; its weights are read only if the forward pass did not call it as a module.
        tolerance: maximum relative difference of logits that are computed again in that case.
        source: the model's name in error messages.

    Raises:
        TreepackError: if the logits are scaled, capped, or computed from other states.
    """
    states, logits = _last(seen.states), _last(logits)
    # Slices and casts are exact, so there is no tolerance: a cap of 30 changes logits near 1 by 4e-4 only.
    if any(_follows(inputs, states) and _follows(logits, output) for inputs, output in seen.heads):
        return
    # A compiled model may not run hooks; sharded weights may not be whole here.
    if not seen.heads and head.weight.shape[-1] == states.shape[-1] and head.weight.ndim == 2:
        expected = linear(states, head.weight, getattr(head, "bias", None))
        if expected.shape == logits.shape and relative_error(logits, expected) <= tolerance:
            return
    raise TreepackError(
        f"{source}: its logits are not its output layer of the hidden states (it scales or caps them, or has a layer "
        "in between), and treepack computes no other logits yet; train another model"
    )


def _last(values: Tensor) -> Tensor:
    # [B, n, D] -> [B, 1, D]
    return values[:, -1:].detach().clone()


def relative_error(values: Tensor, expected: Tensor) -> float:
    """Return |values - expected| / |expected| in Euclidean norms; NaN if there is a NaN in either."""
    return float((values.double() - expected.double()).norm() / expected.double().norm())


def _follows(later: Tensor, earlier: Tensor) -> bool:
    """Return True if `later` has the values of `earlier`, cast to its own dtype."""
    if later.shape != earlier.shape:
        return False
    # NaN equals NaN here: a run that diverges is no reason to refuse the model
    return bool(((later == earlier.to(later.dtype)) | (later.isnan() & earlier.isnan())).all())
