"""Log-probability of a label and entropy of the distribution of each row of logits, with their gradients.

    x [n, V], the output layer's result --LogitMap, / temperature--> z --softmax--> log p[label] [n], entropy [n]

`TokenStatistics` computes them in torch, at any precision and on any device. On a GPU `fused_statistics` does the same
in two kernels, which read the logits once each and never store them in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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


def token_statistics(
    x: Tensor, labels: Tensor, temperature: Tensor | None, logit_map: LogitMap, with_entropies: bool
) -> tuple[Tensor, Tensor]:
    """Return log p[label] and the entropy of softmax(logit_map(x) / temperature) for each row of `x`.

    Args:
        x: [n, V].
        labels: int64 [n].
        temperature: float [n], above 0; None for 1.
        logit_map: the model's last step.
        with_entropies: False puts NaN in place of the entropies.

    Returns:
        two tensors [n], in nats: float64 for float64 `x`, else float32.
    """
    function: Any = TokenStatistics
    if x.is_cuda and x.dtype != torch.float64:
        from treepack.model.fused_statistics import FusedStatistics  # imports triton

        function = FusedStatistics
    elif x.dtype != torch.float64:
        x = x.float()
    statistics: tuple[Tensor, Tensor] = function.apply(x, labels, temperature, logit_map, with_entropies)
    return statistics


class TokenStatistics(torch.autograd.Function):
    """The statistics in torch; the logits are the only [n, V] tensor that it saves.

    With z = logit_map(x) / T, p = softmax(z), l = log p[label] and H = -sum p log p:

        dl/dz = onehot(label) - p        dH/dz = -p (log p + H)        dz/dx = logit_map'(x) / T
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, labels: Tensor, temperature: Tensor | None, logit_map: LogitMap, with_entropies: bool
    ) -> tuple[Tensor, Tensor]:
        z = logit_map(x)
        if temperature is not None:
            temperature = temperature.to(x.dtype)[:, None]
            z = z / temperature if z is x else z.div_(temperature)
        total = z.logsumexp(-1)  # [n]
        # entr(p) = -p log p, with 0 for p = 0; exp_ works in place to allocate one [n, V] tensor less
        entropies = torch.full_like(total, torch.nan)
        if with_entropies:
            entropies = torch.special.entr((z - total[:, None]).exp_()).sum(-1)
        else:
            ctx.mark_non_differentiable(entropies)
        ctx.save_for_backward(z, labels, total, entropies, temperature)
        ctx.logit_map = logit_map
        ctx.set_materialize_grads(False)  # an unused output has the gradient None, which saves its share of backward
        return z.gather(-1, labels[:, None]).squeeze(-1) - total, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        z, labels, total, entropies, temperature = ctx.saved_tensors
        logprob_grad, entropy_grad = grads
        if logprob_grad is None and entropy_grad is None:
            return None, None, None, None, None
        p = (z - total[:, None]).exp_()  # [n, V], the softmax again
        if entropy_grad is None:
            assert logprob_grad is not None
            result = p.mul_(-logprob_grad[:, None])
        else:
            # -p (log p + H) = entr(p) - p H
            result = (torch.special.entr(p) - p * entropies[:, None]).mul_(entropy_grad[:, None])
            if logprob_grad is not None:
                result.addcmul_(p, logprob_grad[:, None], value=-1)
        if logprob_grad is not None:
            # the onehot(label) part: one element of each row
            result.scatter_add_(-1, labels[:, None], logprob_grad[:, None])
        if temperature is not None:
            result.div_(temperature)
        if ctx.logit_map != LogitMap():
            result.mul_(ctx.logit_map.slope(z if temperature is None else z * temperature))
        return result, None, None, None, None
