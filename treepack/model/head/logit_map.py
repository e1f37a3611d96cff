"""An output layer with the last step of a model's logits, and numbers about the targets of a chunk: values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.functional import linear


@dataclass(frozen=True)
class LogitMap:
    """The last step of some models: logits = cap * tanh(scale * x / cap) of the output layer's result x.

    Without a cap, logits = scale * x (Cohere, Granite). Gemma 2 has the scale 1 and a cap of 30.
    """

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits of `x`; `x` itself if nothing changes."""
        if self.scale != 1:
            x = x * self.scale
        return x if self.cap is None else (x / self.cap).tanh() * self.cap

    def slope(self, logits: Tensor) -> Tensor | float:
        """Return the derivative of `logits` by the output layer's result."""
        # d/dx cap tanh(s x / cap) = s (1 - tanh^2) = s (1 - (logits / cap)^2)
        return self.scale if self.cap is None else (1 - (logits / self.cap).square_()).mul_(self.scale)


@dataclass(frozen=True)
class OutputLayer:
    """The whole weights [V, D] and bias [V] of an output layer, and the change that the model makes to its result.

    `share` is the `sequence.share.TokenShare` of the states, if this rank has only a part of a row's states.
    """

    weight: Tensor
    bias: Tensor | None = None
    logit_map: LogitMap = LogitMap()
    share: Any = None

    def logits(self, states: Tensor) -> Tensor:
        """Return the model's logits [..., V] of hidden states [..., D]."""
        return self.logit_map(linear(states, self.weight, self.bias))


class TargetStatistics(NamedTuple):
    """Numbers about n targets, [n] each: float64 for float64 logits, else float32.

    `totals` are log sum exp z. Entropies are NaN if they are not wanted. `divergences` are from a teacher's law, None
    without one.
    """

    logprobs: Tensor
    totals: Tensor
    entropies: Tensor
    divergences: Tensor | None = None


class TargetSlopes(NamedTuple):
    """The derivatives of a loss by the log-probabilities, entropies and divergences of n targets, [n] each; None for 0.

    Their dtype is that of the statistics.
    """

    logprobs: Tensor | None
    entropies: Tensor | None
    divergences: Tensor | None = None
