"""Are the gradients of these packed rows those of their trajectories run one by one? Measured, on any model.

    rows -> tree attention -> gradients           \
                                                    relative difference, per parameter
    each trajectory alone -> sdpa -> gradients    /    (eager, where a model has no sdpa)

The second path is the plain model of transformers: its own attention, its own logits, one forward per trajectory,
tokens found by chasing parents. A trajectory's weight at a token is loss_weight / scale: what the row gives the token,
split evenly over the trajectories that pass through it, which sums to the same loss. Objectives over terms get the
log-probabilities of every trajectory run alone in place of those gathered from the row.

float64 leaves no doubt (tolerance 1e-9); float32 is what a compiled kernel can be held to (1e-4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from treepack.data.batch import Batch, TermTensors
from treepack.errors import TreepackError
from treepack.model.forward import row_loss, row_objective
from treepack.model.load import LoadedModel
from treepack.model.objectives import Objective, objective_loss
from treepack.model.probe import attention_of

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
    loaded: LoadedModel,
    batches: Sequence[Batch],
    *,
    tolerance: float | None = None,
    objective: Objective = Objective(),  # noqa: B008
    factors: Sequence[Tensor | None] | None = None,
) -> GradientReport:
    """Compare the gradients of `batches` with those of their trajectories run alone.

    Args:
        loaded: a model in float64 or float32; its gradients are cleared.
        batches: a few rows, on the model's device.
        tolerance: greatest relative difference that passes; 1e-9 in float64 and 1e-4 in float32 by default.
        objective: what the rows are trained with; losses are then those of one optimiser step over `batches`.
        factors: of each batch's terms, where the objective is over terms; see `denominators.step_factors`.

    Raises:
        TreepackError: if the model is in a lower precision, or the rows have no loss weight.
    """
    model, dtype = loaded.model, loaded.model.dtype
    if dtype not in TOLERANCE:
        raise TreepackError(f"{loaded.source}: is in {dtype}; verify gradients in float64 or float32")
    if not any(batch.total_weight for batch in batches):
        raise TreepackError("verify: no row carries loss weight; choose rows with trained tokens")
    model.eval()
    rows = list(zip(batches, factors or [None] * len(batches), strict=True))
    with _KeepFloat64():
        packed = _gradients(model, (_loss_packed(loaded, batch, own, objective) for batch, own in rows))
        with attention_of(model, "sdpa" if model._supports_sdpa else "eager"):
            alone = _gradients(
                model, (loss for batch, own in rows for loss in _losses_alone(model, batch, own, objective))
            )
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


def _loss_packed(loaded: LoadedModel, batch: Batch, factors: Tensor | None, objective: Objective) -> Tensor:
    if factors is None:
        return row_loss(loaded, batch)
    return row_objective(loaded, batch, factors, objective)[0]


def _losses_alone(model: Any, batch: Batch, factors: Tensor | None, objective: Objective) -> Iterator[Tensor]:
    """Loss of each trajectory of the row, from the whole model."""
    if factors is not None:
        yield from _objective_alone(model, batch, factors, objective)
        return
    parent, share = batch.parent.tolist(), batch.loss_weight / batch.scale.clamp(min=1)
    for end in batch.trajectory_ends.tolist():
        path = torch.tensor(_path(parent, end), device=batch.input_ids.device)
        tokens, weights = batch.input_ids[path], share[path]
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        yield (cross_entropy(logits, tokens[1:], reduction="none").double() * weights[1:]).sum()


def _objective_alone(model: Any, batch: Batch, factors: Tensor, objective: Objective) -> Iterator[Tensor]:
    """Scalars with the gradient of each trajectory, the first with the loss of the row as its value.

    The objective needs all trajectories at once and memory holds the graph of one, so its gradient by every
    log-probability and entropy is taken first, and each trajectory is run again to carry its own part back.
    """
    terms = batch.terms
    assert terms is not None
    num = len(batch.trajectory_ids)
    with torch.no_grad():
        parts = [_statistics_alone(model, batch, terms, i) for i in range(num)]
    columns = [torch.zeros(len(terms.index), dtype=torch.float64, device=factors.device) for _ in range(2)]
    for own, *values in parts:
        for column, value in zip(columns, values, strict=True):
            column[own] = value.double()
    logprobs, entropies = (column.requires_grad_() for column in columns)
    each = torch.arange(len(terms.index), device=factors.device)
    loss, _ = objective_loss(logprobs, entropies, replace(terms, index=each), factors, objective)
    slopes = torch.autograd.grad(loss, (logprobs, entropies), allow_unused=True, materialize_grads=True)
    value = loss.detach()
    for i in range(num):
        own, *found = _statistics_alone(model, batch, terms, i)
        carried = torch.stack([(x.double() * slope[own]).sum() for x, slope in zip(found, slopes, strict=True)]).sum()
        yield carried - carried.detach() + value
        value = torch.zeros_like(value)


def _statistics_alone(model: Any, batch: Batch, terms: TermTensors, i: int) -> tuple[Tensor, Tensor, Tensor]:
    """Trajectory `i` run alone: which terms are its own, their log-probabilities and entropies."""
    own = (terms.trajectory == i).nonzero().squeeze(-1)
    path = torch.tensor(_path(batch.parent.tolist(), int(batch.trajectory_ends[i])), device=own.device)
    places = torch.searchsorted(path, terms.tokens[terms.index[own]])
    logs = model(input_ids=batch.input_ids[path][None], use_cache=False).logits[0, places - 1].log_softmax(-1)
    labels = batch.input_ids[path[places]]
    return own, logs.gather(-1, labels[:, None]).squeeze(-1), -(logs.exp() * logs).sum(-1)


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
