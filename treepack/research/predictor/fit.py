"""Fitting of the prefix value predictor, which predicts success from a prompt or a prefix of a rollout.

    FitData, model --open_fit--> _CheckedFit    unsuitable models are refused here, and data in `fit_data`
    _CheckedFit --fit--> out/                   one FitStep per optimiser step; the directory is whole or absent

TRACE (arXiv 2606.11119), section 4.3: the target of a prefix is the share of successes among the rollouts below it
(eq. 18). The loss is the mean squared error (eq. 19) over all prompts and a share of the prefixes (appendix E.6).
`predictor.rows` makes the rows, in which a token is computed once for all prefixes that contain it. `predictor.model`
defines the model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from treepack.data.epochs import epoch_order
from treepack.errors import TreepackError
from treepack.files.directory import finished_directory
from treepack.files.remote.address import AnyPath, as_output
from treepack.memory.shortage import LOADING, memory_errors
from treepack.model.head.value_head import ValueHead
from treepack.model.layers import adapt_layers, find_decoder
from treepack.research.predictor.fit_data import FitData, FitOptions
from treepack.research.predictor.model import (
    ValueModel,
    check_rows,
    end_states,
    row_memory_errors,
    save_values,
    start_values,
    values_of_states,
)
from treepack.research.predictor.record import METRICS
from treepack.research.predictor.rows import AnchorRow
from treepack.train.options import TrainOptions
from treepack.train.schedule import OptimiserStep, learning_rate
from treepack.train.setup.compute import choose_compute
from treepack.train.watch.metrics import MetricsLog
from treepack.trajectory import Float64

# The options of `treepack train` that a fit uses.
_SHARED_OPTIONS = frozenset(
    "epochs rows_per_step lr min_lr_ratio warmup_steps weight_decay betas clip "
    "dtype checkpoint_layers attention device seed".split()
)


@dataclass(frozen=True)
class _CheckedFit:
    """A checked fit: its data, model and options, and the rows of every optimiser step."""

    data: FitData
    model: ValueModel
    schedule: list[OptimiserStep]
    notes: tuple[str, ...]

    @property
    def options(self) -> FitOptions:
        """The options, with the dtype that the device has."""
        return self.data.options

    @property
    def rows(self) -> list[AnchorRow]:
        """The supervised rows."""
        return self.data.rows

    @property
    def num_anchors(self) -> int:
        """The number of supervised prompts and prefixes."""
        return sum(len(row.node) for row in self.rows)

    @property
    def constant_loss(self) -> float:
        """The loss of the best constant, which is the mean: the minimum for a predictor that ignores its input."""
        return float(self.data.target[np.concatenate([row.node for row in self.rows])].var())


@dataclass(frozen=True)
class FitStep:
    """Measurements of one optimiser step; `loss` is the mean squared error of its `num_anchors` before the update."""

    step: int
    epoch: int
    loss: float
    lr: float
    grad_norm: float
    num_rows: int
    num_anchors: int
    tokens: int
    seconds: float


def _squared_error(head: ValueHead, states: Tensor, target: Float64) -> Tensor:
    """Return the sum of squared differences between the values of `states` [n, D] and `target` [n]: float64, eq. 19."""
    # In float64, so that the sum over thousands of prefixes is as exact as their values.
    targets = torch.from_numpy(target).to(states.device)
    return (values_of_states(head, states).double() - targets).square().sum()


def open_fit(data: FitData, model: str | Path) -> _CheckedFit:
    """Load the model, and check that it fits the data.

    Raises:
        TreepackError: the device is missing, the model is not supported, or it does not fit the data.
    """
    compute = choose_compute(data.options.train)
    train = replace(data.options.train, dtype=compute.dtype)
    data = replace(data, options=replace(data.options, train=train))
    with memory_errors(*LOADING):
        predictor = start_values(model, train.dtype, train.attention, compute.device, train.seed)
    loaded = predictor.loaded
    check_rows(predictor, data.rows, data.origin["tokenizer"], data.trie)
    # A frozen backbone runs without gradients, so nothing has to be computed again.
    count = train.checkpoint_layers
    adapt_layers(
        loaded.model,
        checkpointing=count not in ("auto", 0) and not data.options.freeze,
        compiled=False,
        recomputed=count if isinstance(count, int) else None,
    )
    fitted = (f"the head of {model} is used and fitted further",) if predictor.record else ()
    notes = (*loaded.notes, *fitted, *data.notes)
    return _CheckedFit(data, predictor, _schedule(len(data.rows), train), notes)


def _schedule(num_rows: int, train: TrainOptions) -> list[OptimiserStep]:
    """Return the rows of every optimiser step, in a new order in each epoch."""
    schedule: list[OptimiserStep] = []
    for epoch in range(train.epochs):
        # No training steps, so the epoch has one part.
        (part,) = epoch_order([None] * num_rows, range(num_rows), seed=train.seed, epoch=epoch)
        order = part.tolist()
        schedule += [
            OptimiserStep(epoch, order[i : i + train.rows_per_step]) for i in range(0, num_rows, train.rows_per_step)
        ]
    return schedule


def fit(run: _CheckedFit, out: str | AnyPath, *, overwrite: bool = False) -> Iterator[FitStep]:
    """Fit the predictor, and yield after every optimiser step; `out` appears after the last step.

    Raises:
        TreepackError: `out` exists, a loss or gradient is not finite, memory is too small, or the disk fails.
    """
    loaded, parameters = run.model.loaded, list(run.model.head.parameters())
    if not run.options.freeze:
        # Without the output layer, which has no part in the values.
        parameters = [*find_decoder(loaded.model).parameters(), *parameters]
        loaded.model.train()  # only for checkpointing, which transformers does in this mode; all dropouts are 0
    optimiser = _optimiser(parameters, run.options.train)
    states_of = _frozen_states(run) if run.options.freeze else lambda row: end_states(loaded, row, dtype=_dtype(run))
    with finished_directory(as_output(out), overwrite=overwrite) as temporary:
        # The log is closed before the directory gets its name. A fit is short and cannot be resumed.
        with closing(MetricsLog(temporary / METRICS, keep_until=None)) as log:
            for number in range(len(run.schedule)):
                step = _fit_step(run, optimiser, number, states_of)
                log.write(asdict(step))
                yield step
        loaded.model.eval()
        save_values(run.model, temporary, _entries(run))


def _entries(run: _CheckedFit) -> dict[str, Any]:
    """Return the entries of values.json about the fit."""
    fit_options = {name: getattr(run.options, name) for name in ("capacity", "segment", "prefix_share", "freeze")}
    shared = {name: value for name, value in run.options.train.as_record().items() if name in _SHARED_OPTIONS}
    counts = {"num_prompts": run.data.num_prompts, "num_anchors": run.num_anchors}
    return {"model": run.model.loaded.source, **run.data.origin, "options": fit_options | shared, **counts}


def _dtype(run: _CheckedFit) -> str:
    return run.options.train.dtype


def _frozen_states(run: _CheckedFit) -> Callable[[AnchorRow], Tensor]:
    """Return `end_states` with a cache, which computes each row once, for use with a frozen backbone."""
    states: dict[int, Tensor] = {}  # by row_id; [n, D] each, only the ends of prefixes, so all rows fit in memory

    def states_of(row: AnchorRow) -> Tensor:
        if row.row.row_id not in states:
            with torch.no_grad():
                states[row.row.row_id] = end_states(run.model.loaded, row, dtype=_dtype(run))
        return states[row.row.row_id]

    return states_of


def _optimiser(parameters: Sequence[nn.Parameter], train: TrainOptions) -> torch.optim.AdamW:
    """Return AdamW without weight decay for parameters of one dimension (biases and norms)."""
    # Not `train.optimiser.make_adamw`, whose fused kernel rounds differently: a fit would get other bits.
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=train.lr, betas=train.betas)


def _fit_step(
    run: _CheckedFit, optimiser: torch.optim.Optimizer, number: int, states_of: Callable[[AnchorRow], Tensor]
) -> FitStep:
    """Carry out optimiser step `number`, counted from 0.

    Raises:
        TreepackError: the loss or gradient is not finite, or memory is too small.
    """
    start, step, train = time.perf_counter(), run.schedule[number], run.options.train
    rows = [run.rows[i] for i in step.rows]
    lr = learning_rate(train, number, len(run.schedule))
    for group in optimiser.param_groups:  # all groups have one rate; they differ in weight decay
        group["lr"] = lr
    optimiser.zero_grad(set_to_none=True)
    loss = accumulate(run.model.head, rows, run.data.target, states_of)
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, train.clip or math.inf))  # infinity: only measure
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise TreepackError(
            f"the loss or gradient of step {number + 1} is not finite; lower --lr, or check that the model computes "
            "finite hidden states"
        )
    optimiser.step()
    computed = [] if run.options.freeze and step.epoch else rows  # a frozen backbone runs only in the first epoch
    return FitStep(
        step=number + 1,
        epoch=step.epoch,
        loss=loss,
        lr=lr,
        grad_norm=norm,
        num_rows=len(rows),
        num_anchors=sum(len(row.node) for row in rows),
        tokens=sum(row.row.num_tokens for row in computed),
        seconds=time.perf_counter() - start,
    )


def accumulate(
    head: ValueHead, rows: Sequence[AnchorRow], target: Float64, states_of: Callable[[AnchorRow], Tensor]
) -> float:
    """Return the mean squared error over all prefixes of `rows`, and add its gradients to the parameters.

    It is one mean over prefixes, so it does not depend on how prefixes are distributed over rows.

    Args:
        head: the head of the predictor.
        rows: rows of one optimiser step.
        target: float64 [num_inner], by node.
        states_of: a function that returns the hidden states of a row, like `end_states`.

    Raises:
        TreepackError: memory is too small for a row.
    """
    denominator = sum(len(row.node) for row in rows)  # rows of 3 and 5 ends: each squared error counts 1/8
    losses = []
    for row in rows:
        with row_memory_errors(row):
            loss = _squared_error(head, states_of(row), target[row.node]) / denominator
            torch.autograd.backward(loss)
        losses.append(loss.detach())  # not float(loss), which would wait for the GPU after every row
    return float(torch.stack(losses).sum())
