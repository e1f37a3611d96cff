"""The auxiliary loss that balances the experts of a mixture, over the trajectories of an optimiser step.

With p[l, t, i] the softmax of the router's logits of layer l, and chosen[l, t, i] 1 for each of its k experts:

    f[i] = sum over l and t of scale[t] * chosen[l, t, i] / R       R = layers * sum of scale[t]
    P[i] = sum over l and t of scale[t] * p[l, t, i] / R            loss = experts * sum of f[i] * P[i]

This is `load_balancing_loss_func` of transformers for one batch with all trajectories of the step, without padding: a
token that `scale[t]` trajectories share counts `scale[t]` times. The sums run over all rows and ranks. One difference:
transformers counts the k largest p as chosen, which are other experts if a bias takes part in the router's choice.

f has no gradient, and the gradient of P[i] is f[i] times that of p. So f of the whole step must be known before the
first backward pass: a forward pass without gradients counts first, and costs about a quarter of a step.

    balance = RouterBalance(causal, coefficient)      hooks on the routers, idle between the blocks
    with balance.counting(scale): forward             every row; then add the sums of all ranks
    loss = balance.finish(sums)                       a number for the metrics
    with balance.attached(scale): forward, backward   every row; gradients of coefficient * loss are added

A row in pieces counts each token in the piece that runs it: `places_of_piece`. The last block attaches the row's part
of the loss to the router's weights, which the layer uses anyway, so layers that are recomputed, compiled or sharded
need nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler at once

from treepack.errors import TreepackError
from treepack.sequence.share import sequence_of

_BALANCE = "_treepack_router_balance"


class RouterBalance:
    """Counts and gradients of the load-balancing loss, one optimiser step at a time."""

    def __init__(self, causal: Any, coefficient: float, *, source: str) -> None:
        """Put a hook on every router of `causal`, a model of transformers named `source` in errors.

        Raises:
            TreepackError: if the model has no routers whose loss transformers defines.
        """
        self.routers = _find_routers(causal, source)
        self.coefficient, self.source = coefficient, source
        self._sums: Tensor | None = None  # float64 [2 E + 1]: of chosen, of p, and R, while a step is counted
        self._slopes: Tensor | None = None  # float64 [E]: coefficient * experts * f / R
        self._scale: Tensor | None = None  # float64 [T] of the current row
        self._places: Tensor | None = None  # int64 [t], the places in the row of the tokens of a piece
        self._attaching = False
        self._causal = causal
        setattr(causal, _BALANCE, self)
        for router in self.routers:
            router.register_forward_hook(self._observe)

    @contextmanager
    def counting(self, scale: Tensor) -> Iterator[None]:
        """Count the forward pass of a row in the block; `scale` int [T] is 0 at padding."""
        yield from self._row(scale, attaching=False)

    @contextmanager
    def attached(self, scale: Tensor) -> Iterator[None]:
        """Add the gradient of the loss to the backward pass in the block, after `finish`."""
        yield from self._row(scale, attaching=True)

    def _row(self, scale: Tensor, *, attaching: bool) -> Iterator[None]:
        self._scale, self._attaching = scale.double(), attaching
        try:
            yield
        finally:
            self._scale = None

    @contextmanager
    def piece(self, places: Tensor) -> Iterator[None]:
        """Run some tokens of the current row in the block: those at `places`, int64 [t]."""
        self._places = places
        try:
            yield
        finally:
            self._places = None

    def drop(self) -> None:
        """Forget the rows of a step that failed."""
        self._sums = None

    def sums(self) -> Tensor:
        """Return the counts of this rank since `finish`, float64 [2 E + 1]; sums of ranks add up."""
        assert self._sums is not None, "every rank computes at least one row"
        return self._sums

    def finish(self, sums: Tensor) -> float:
        """End the counting of a step with the `sums` over all ranks, and return the loss without its coefficient."""
        self._sums = None
        chosen, probabilities = sums[:-1].chunk(2)
        num_experts, total = len(chosen), sums[-1]
        self._slopes = self.coefficient * num_experts * chosen / total.square()
        return float(num_experts * (chosen * probabilities).sum() / total.square())

    # Global state and a custom function: a compiled layer breaks its graph here.
    @_disable_dynamo
    def _observe(self, router: nn.Module, _: Any, output: Any) -> Any:
        """Count the output of a router, or return it with the row's part of the loss attached.

        Raises:
            TreepackError: if the output has another form than transformers gave it in 5.0 to 5.23.
        """
        if self._scale is None:
            return None
        if not _is_routed(output):
            raise TreepackError(
                f"{self.source}: its {type(router).__name__} does not return logits, weights and experts; train it "
                "without --router-aux"
            )
        logits, weights, experts = output
        # softmax in float32, or float64 for float64 logits
        p = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        if not self._attaching:
            self._count(p.detach(), experts)
            return None
        assert self._slopes is not None, "finish comes before attached"
        part = (p.double() @ self._slopes) @ self._of_tokens()
        return logits, _attach(weights, part), experts

    def _of_tokens(self) -> Tensor:
        assert self._scale is not None
        scale = self._scale if self._places is None else self._scale.index_select(0, self._places)
        sequence = sequence_of(self._causal)
        return scale if sequence is None else sequence.share(len(scale)).weights(scale)

    def _count(self, p: Tensor, experts: Tensor) -> None:
        scale = self._of_tokens()
        # experts [[2, 0]] of E = 3 -> [[1, 0, 1]]
        chosen = torch.zeros(p.shape, dtype=torch.float64, device=p.device).scatter_(1, experts, 1.0)
        row = torch.cat([scale @ chosen, scale @ p.double(), scale.sum()[None]])
        self._sums = row if self._sums is None else self._sums + row


def places_of_piece(causal: Any, places: Tensor) -> AbstractContextManager[None]:
    """Return the context in which a piece of a row runs; it has no effect on a model without the loss."""
    balance: RouterBalance | None = getattr(causal, _BALANCE, None)
    return nullcontext() if balance is None else balance.piece(places)


def _find_routers(causal: Any, source: str) -> list[nn.Module]:
    """Return the routers of a model whose configuration has a coefficient for the loss.

    Raises:
        TreepackError: if the model has no router.
    """
    config = causal.config.get_text_config()
    recorded = (getattr(causal.base_model, "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorded, "target_class", None)
    routers = [module for module in causal.modules() if kind is not None and isinstance(module, kind)]
    if not routers or not hasattr(config, "router_aux_loss_coef"):
        raise TreepackError(
            f"{source}: transformers defines no load-balancing loss for {type(causal).__name__}; train it without "
            "--router-aux"
        )
    return routers


def _is_routed(output: Any) -> bool:
    if not (isinstance(output, tuple) and len(output) == 3 and all(isinstance(each, Tensor) for each in output)):
        return False
    logits, weights, experts = output
    return logits.ndim == 2 and weights.shape == experts.shape and not experts.is_floating_point()


class _AttachLoss(torch.autograd.Function):
    """Return `x` as it is, and give the scalar `part` the gradient 1 in the backward pass of `x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Tensor) -> Tensor:
        ctx.like = part.new_ones(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, ctx.like


def _attach(x: Tensor, part: Tensor) -> Tensor:
    apply: Any = _AttachLoss.apply
    attached: Tensor = apply(x, part)
    return attached
