"""Measure, on any model, that the gradients of packed rows equal the gradients of their trajectories run one by one.

    rows -> tree attention -> gradients           \
                                                    relative difference, per parameter
    each trajectory alone -> sdpa -> gradients    /    (eager, if sdpa lacks a part of the model)

The second path is the plain model of transformers: its own attention, its own logits, one forward pass per trajectory.
It finds the tokens of a trajectory by following parents from its end. Their weight is loss_weight / scale: the weight
of the token in the row, split evenly over the trajectories through the token, so that the sum is the same loss. For
objectives over terms, the log-probabilities come from the trajectories run alone instead of from the row.

In float64 a pass leaves no doubt (tolerance 1e-9); float32 is for compiled kernels, which have no float64 (1e-4).

To save memory, both sides recompute their layers in the backward pass, and the output layer is applied to a chunk of
positions at a time. `train.verification` selects the trajectories of rows that are too long.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from treepack.data.batch import Batch
from treepack.errors import TreepackError
from treepack.model.accept.probe import use_attention
from treepack.model.forward import RowRunner, WholeRows
from treepack.model.layers import find_layers
from treepack.model.loaded import LoadedModel
from treepack.model.verify.verify_alone import PlainModel, losses_alone
from treepack.objectives.objective import Objective
from treepack.objectives.row_numbers import LossPart

_log = logging.getLogger("treepack")

# Makes the runner of the packed rows from the model and the tokens whose logits are in memory at a time.
RunnerMaker: TypeAlias = Callable[[LoadedModel, int], RowRunner]

# Targets whose logits are in memory at a time; smaller than in training, which has no weights in float64.
_CHUNK = 512

# Maximum relative difference: seven and three digits above the rounding unit, since sums over tokens add up rounding.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}

# Numbers of a gradient that are in memory in float64 at once: 256 MB.
_NORM_BLOCK = 1 << 25

# Some gradients are zero in exact arithmetic and pure rounding noise in practice: a bias of all keys shifts every score
# by the same amount. A relative error of noise means nothing, so the norm that an error is divided by is at least this
# share of the norm of the whole gradient.
_MIN_NORM_SHARE = {torch.float64: 1e-6, torch.float32: 1e-3}


@dataclass(frozen=True)
class GradientReport:
    """The comparison of packed rows with trajectories run alone.

    `errors` contains |packed - alone| / |alone| in Euclidean norms for each parameter. For sft the losses are sums of
    weight * nll. `loss_scale` is the sum of the absolute losses of the trajectories: advantages of both signs may
    cancel in `loss_alone`, and the remainder may be rounding.
    """

    dtype: str
    attention: str
    num_rows: int
    num_trajectories: int
    loss_packed: float
    loss_alone: float
    errors: dict[str, float]
    tolerance: float
    loss_scale: float = 0.0

    @property
    def loss_error(self) -> float:
        """The difference of the two losses, relative to the sum of the absolute losses of the trajectories."""
        scale = max(self.loss_scale, abs(self.loss_alone), 1e-300)  # 0 / 0 counts as 0
        return abs(self.loss_packed - self.loss_alone) / scale

    @property
    def worst(self) -> tuple[str, float]:
        """The parameter with the largest error, and its error."""
        return max(self.errors.items(), key=lambda item: item[1])

    @property
    def passed(self) -> bool:
        """True if no gradient and no loss differs by more than the tolerance."""
        return self.worst[1] <= self.tolerance and self.loss_error <= self.tolerance


def verify_gradients(
    loaded: LoadedModel,
    batches: Sequence[Batch],
    *,
    tolerance: float | None = None,
    objective: Objective = Objective(),  # noqa: B008
    factors: Sequence[Tensor | None] | None = None,
    backward: RunnerMaker | None = None,
) -> GradientReport:
    """Compare the gradients of `batches` with the gradients of their trajectories run alone.

    Args:
        loaded: a model in float64 or float32; its gradients are set to None.
        batches: a few rows, on the model's device.
        tolerance: maximum relative difference that passes; by default 1e-9 in float64 and 1e-4 in float32.
        objective: the objective of the training; `batches` count as one optimiser step.
        factors: factors of each batch's trajectories, from `denominators.step_factors`; None for sft.
        backward: how the packed side runs a row, such as `in_pieces(limit)`; None for one pass over the whole row.

    Raises:
        TreepackError: if the model has a lower precision, the rows have no loss weight, or all gradients are 0.
    """
    model, dtype = loaded.model, loaded.model.dtype
    if dtype not in _TOLERANCE:
        raise TreepackError(f"{loaded.source}: is in {dtype}; verify gradients in float64 or float32")
    if not any(batch.total_weight for batch in batches):
        raise TreepackError("verify: no row has loss weight; choose rows with trained tokens")
    model.eval()
    rows = list(zip(batches, factors or [None] * len(batches), strict=True))
    with KeepFloat64(), _recomputed_layers(model):
        _log.info("gradients of the packed rows")
        runner = (backward or WholeRows)(loaded, _CHUNK)
        # Generators: each loss is computed, run backward and dropped before the next, so one graph exists at a time.
        results = (runner.backward(batch, LossPart(objective, factor)) for batch, factor in rows)
        packed = _gradients(model, (result.loss for result in results))
        if loaded.sequence is not None:
            for gradient in packed[1].values():
                loaded.sequence.add_up(gradient)
        if loaded.device.type == "cuda":
            packed = packed[0], {name: gradient.cpu() for name, gradient in packed[1].items()}, packed[2]
            torch.cuda.empty_cache()  # so that the second set finds memory without gaps
        plain = PlainModel(model, loaded.causal, _CHUNK)
        _log.info("gradients of the trajectories, one by one")
        with use_attention(model, loaded.attention_alone), _fused_attention():
            losses = (loss for batch, factor in rows for loss in losses_alone(plain, batch, factor, objective))
            alone = _gradients(model, map(_run_backward, losses))
    if not any(bool(gradient.any()) for gradient in alone[1].values()):
        raise TreepackError("verify: every gradient is 0, so nothing is compared; choose rows with a loss")
    return GradientReport(
        dtype=str(dtype).removeprefix("torch."),
        attention=loaded.attention,
        num_rows=len(batches),
        num_trajectories=sum(len(batch.trajectory_ids) for batch in batches),
        loss_packed=packed[0],
        loss_alone=alone[0],
        loss_scale=alone[2],
        errors=_relative_errors(packed[1], alone[1], _MIN_NORM_SHARE[dtype]),
        tolerance=_TOLERANCE[dtype] if tolerance is None else tolerance,
    )


def _gradients(model: Any, losses: Iterator[Tensor]) -> tuple[float, dict[str, Tensor], float]:
    """Return the sum of `losses`, its gradient by every trained parameter, and the sum of the absolute losses.

    The iterator `losses` adds their gradients.
    """
    model.zero_grad(set_to_none=True)
    total = scale = 0.0
    for loss in losses:
        total += loss.item()
        scale += abs(loss.item())
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    model.zero_grad(set_to_none=True)  # drops the model's references; the next call starts with new tensors
    return total, gradients, scale


def _run_backward(loss: Tensor) -> Tensor:
    torch.autograd.backward(loss)
    return loss.detach()


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Let transformers repeat key heads for torch's attention, instead of torch itself.

    In float32 torch has no fused kernel for groups of heads: scores [heads, L, L] would be in memory.
    """
    from transformers.integrations import sdpa_attention

    name = "use_gqa_in_sdpa"
    before = getattr(sdpa_attention, name, None)
    if before is not None:
        setattr(sdpa_attention, name, lambda *_: False)
    try:
        yield
    finally:
        if before is not None:
            setattr(sdpa_attention, name, before)


@contextmanager
def _recomputed_layers(model: Any) -> Iterator[None]:
    """Recompute the layers of `model`, as `find_layers` returns them, in the backward pass; restore them at the end."""
    # Not by the switch of transformers, which has an effect in training mode only.
    layers = find_layers(model)
    forwards = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = partial(checkpoint, _keep_float64(layer.forward), use_reentrant=False)
    try:
        yield
    finally:
        for layer, forward in zip(layers, forwards, strict=True):
            del layer.forward  # the method of the class is visible again
            if forward is not None:
                layer.forward = forward


def _keep_float64(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` under `KeepFloat64`, which torch leaves for the whole backward pass."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with KeepFloat64():
            return forward(*args, **kwargs)

    return wrapper


class KeepFloat64(TorchFunctionMode):
    """Keep float64 tensors in float64 although a model's norms and softmax cast to float32, too coarse for 1e-9."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            # softmax(x, dtype=torch.float32), x.to(torch.float32): the dtype is an argument
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _relative_errors(
    gradients: dict[str, Tensor], expected: dict[str, Tensor], min_norm_share: float
) -> dict[str, float]:
    norms = {name: _norm(gradient) for name, gradient in expected.items()}
    min_norm = min_norm_share * sum(norm**2 for norm in norms.values()) ** 0.5
    # 1e-300 avoids 0 / 0 if all gradients are 0.
    return {
        name: _norm(gradient, gradients[name]) / max(norms[name], min_norm, 1e-300)
        for name, gradient in expected.items()
    }


def _norm(a: Tensor, b: Tensor | None = None) -> float:
    """Return the Euclidean norm of `a`, or of `a - b`, in float64; `b` may be on another device."""
    total = 0.0
    others = None if b is None else torch.split(b.flatten(), _NORM_BLOCK)
    for i, part in enumerate(torch.split(a.flatten(), _NORM_BLOCK)):
        values = part.double() if others is None else part.double() - others[i].to(part.device).double()
        total += float(values.square().sum())
    return math.sqrt(total)
