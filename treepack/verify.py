"""Are the gradients of these packed rows those of their trajectories run one by one? Measured, on any model.

    rows -> tree attention -> gradients           \
                                                    relative difference, per parameter
    each trajectory alone -> sdpa -> gradients    /    (eager, where a model has no sdpa)

The second path is the plain model of transformers: its own attention, its own logits, one forward per trajectory,
tokens found by chasing parents. A trajectory's weight at a token is loss_weight / scale: what the row gives the token,
split evenly over the trajectories that pass through it, which sums to the same loss.

float64 leaves no doubt (tolerance 1e-9); float32 is what a compiled kernel can be held to (1e-4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from treepack.batch import Batch
from treepack.errors import TreepackError
from treepack.model import LoadedModel, row_loss
from treepack.probe import attention_of

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}

# Some gradients are zero in exact arithmetic (a bias of all keys shifts every score alike) and noise in any other; a
# parameter's gradient therefore counts as at least this share of the whole.
_FLOOR = {torch.float64: 1e-6, torch.float32: 1e-3}


@dataclass(frozen=True)
class GradientReport:
    """Packed rows against trajectories one by one.

    `errors` holds, per parameter, |packed - alone| / |alone| in Euclidean norms; losses are sums of weight * nll.
    """

    dtype: str
    attention: str
    num_rows: int
    num_trajectories: int
    loss_packed: float
    loss_alone: float
    errors: dict[str, float]
    tolerance: float

    @property
    def loss_error(self) -> float:
        return abs(self.loss_packed - self.loss_alone) / max(abs(self.loss_alone), 1e-300)

    @property
    def worst(self) -> tuple[str, float]:
        """The parameter that differs most, and by how much."""
        return max(self.errors.items(), key=lambda item: item[1])

    @property
    def passed(self) -> bool:
        return self.worst[1] <= self.tolerance and self.loss_error <= self.tolerance


def verify_gradients(
    loaded: LoadedModel, batches: Sequence[Batch], *, tolerance: float | None = None
) -> GradientReport:
    """Compare the gradients of `batches` with those of their trajectories run alone.

    Args:
        loaded: a model in float64 or float32; its gradients are cleared.
        batches: a few rows, on the model's device.
        tolerance: greatest relative difference that passes; 1e-9 in float64 and 1e-4 in float32 by default.

    Raises:
        TreepackError: if the model is in a lower precision, or the rows have no loss weight.
    """
    model, dtype = loaded.model, loaded.model.dtype
    if dtype not in TOLERANCE:
        raise TreepackError(f"{loaded.source}: is in {dtype}; verify gradients in float64 or float32")
    if not any(batch.total_weight for batch in batches):
        raise TreepackError("verify: no row carries loss weight; choose rows with trained tokens")
    model.eval()
    with _KeepFloat64():
        packed = _gradients(model, (row_loss(loaded, batch) for batch in batches))
        with attention_of(model, "sdpa" if model._supports_sdpa else "eager"):
            alone = _gradients(model, (loss for batch in batches for loss in _losses_alone(model, batch)))
    return GradientReport(
        dtype=str(dtype).removeprefix("torch."),
        attention=loaded.attention,
        num_rows=len(batches),
        num_trajectories=sum(len(batch.trajectory_ids) for batch in batches),
        loss_packed=packed[0],
        loss_alone=alone[0],
        errors=_errors(packed[1], alone[1], _FLOOR[dtype]),
        tolerance=TOLERANCE[dtype] if tolerance is None else tolerance,
    )


def _gradients(model: Any, losses: Iterator[Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Sum of `losses` and the gradient of every parameter."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    for loss in losses:
        torch.autograd.backward(loss)
        total += loss.item()
    found = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    model.zero_grad(set_to_none=True)
    return total, found


def _losses_alone(model: Any, batch: Batch) -> Iterator[Tensor]:
    """Weighted loss of each trajectory of the row, from the whole model."""
    parent, share = batch.parent.tolist(), batch.loss_weight / batch.scale.clamp(min=1)
    for end in batch.trajectory_ends.tolist():
        path = torch.tensor(_path(parent, end), device=batch.input_ids.device)
        tokens, weights = batch.input_ids[path], share[path]
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        yield (cross_entropy(logits, tokens[1:], reduction="none").double() * weights[1:]).sum()


def _path(parent: list[int], token: int) -> list[int]:
    path = []
    while token >= 0:
        path.append(token)
        token = parent[token]
    return path[::-1]


class _KeepFloat64(TorchFunctionMode):
    """Leaves float64 tensors in float64 where a model's norms and softmax say float32, which would drown 1e-9."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _errors(found: dict[str, Tensor], expected: dict[str, Tensor], floor: float) -> dict[str, float]:
    norms = {name: float(gradient.double().norm()) for name, gradient in expected.items()}
    least = floor * sum(norm**2 for norm in norms.values()) ** 0.5
    return {
        name: float((found[name].double() - gradient.double()).norm()) / max(norms[name], least, 1e-300)
        for name, gradient in expected.items()
    }
