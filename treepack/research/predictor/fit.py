"""Fitting of the prefix value predictor, which predicts success from a prompt or a prefix of a rollout.

    trie, model, options --open_fit--> CheckedFit  unsuitable data, models and options are refused here
    CheckedFit --fit--> out/                   one FitStep per optimiser step; the directory is whole or absent

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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from treepack.data.epochs import epoch_order
from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.directory import MANIFEST, finished_directory
from treepack.files.manifest import file_sha256, read_manifest
from treepack.files.remote.address import AnyPath, as_output
from treepack.memory.shortage import LOADING, memory_errors
from treepack.model.head.value_head import ValueHead
from treepack.model.layers import adapt_layers, find_decoder
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
from treepack.research.predictor.rows import AnchorRow, anchor_prefixes, anchor_rows, draw_nodes, tokens_alone
from treepack.research.trace.targets import anchors, binary_rewards, recursive_targets
from treepack.rl.leaf_weights import leaf_weights
from treepack.train.options import TrainOptions
from treepack.train.schedule import OptimiserStep, learning_rate
from treepack.train.setup.compute import choose_compute
from treepack.train.watch.metrics import MetricsLog
from treepack.trajectory import Float64
from treepack.trie.store.trie_files import read_trie

# The options of `treepack train` that a fit uses.
_SHARED_OPTIONS = frozenset(
    "epochs rows_per_step lr min_lr_ratio warmup_steps weight_decay betas clip "
    "dtype checkpoint_layers attention device seed".split()
)


@dataclass(frozen=True)
class FitOptions:
    """Options of a fit, with the names of the command line; the defaults of lr and epochs are from TRACE too.

    Raises:
        TreepackError: an invalid value, by the name of the option.
    """

    # The options that `treepack train` has too, of which only `_SHARED_OPTIONS` are used.
    train: TrainOptions = field(default_factory=lambda: TrainOptions(lr=3e-5, epochs=2))
    capacity: int = 8192  # maximum tokens of a row
    segment: str = "turn"  # the segments after which prefixes end, see `trace.targets.anchors`
    prefix_share: float = 0.06  # of prefixes among the supervised prompts and prefixes: TRACE, appendix E.6
    freeze: bool = False  # leaves the backbone unchanged and fits only the head

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        if self.capacity < 1:
            raise TreepackError(f"capacity is {self.capacity}; expected at least 1")
        if not 0 <= self.prefix_share <= 1:
            raise TreepackError(f"prefix_share is {self.prefix_share}; expected 0 to 1")


@dataclass(frozen=True)
class CheckedFit:
    """A checked fit: model, options, the supervised rows, and the rows of every optimiser step.

    `target` is float64 [num_inner], by node of the segment tree.
    """

    model: ValueModel
    options: FitOptions
    rows: list[AnchorRow]
    target: Float64
    schedule: list[OptimiserStep]
    num_prompts: int
    tokens_alone: int
    origin: dict[str, Any]
    notes: tuple[str, ...]

    @property
    def num_anchors(self) -> int:
        """The number of supervised prompts and prefixes."""
        return sum(len(row.node) for row in self.rows)

    @property
    def constant_loss(self) -> float:
        """The loss of the best constant, which is the mean: the minimum for a predictor that ignores its input."""
        return float(self.target[np.concatenate([row.node for row in self.rows])].var())


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


def open_fit(trie: str | Path, model: str | Path, options: FitOptions) -> CheckedFit:
    """Read the trie, draw and pack prompts and prefixes, load the model, and check that they fit together.

    Raises:
        TreepackError: a reward is not 0 or 1, a prefix is longer than the capacity, the device is missing, the trie is
            damaged, or the model does not fit the data.
    """
    directory, compute = Path(trie), choose_compute(options.train)
    train, manifest = replace(options.train, dtype=compute.dtype), read_manifest(directory, schema.TRIE_FORMAT)
    options = replace(options, train=train)
    rollouts = read_trie(directory)
    reward = binary_rewards(rollouts)
    ends = anchors(rollouts, segment=options.segment)
    prefixes = anchor_prefixes(rollouts, ends)
    # Drawn once for all epochs, so that each node has the same row in every epoch.
    nodes = draw_nodes(prefixes, prefix_share=options.prefix_share, seed=train.seed)
    rows = anchor_rows(prefixes, nodes, capacity=options.capacity)
    with memory_errors(*LOADING):
        predictor = start_values(model, train.dtype, train.attention, compute.device, train.seed)
    loaded = predictor.loaded
    check_rows(predictor, rows, manifest.get("tokenizer"), directory)
    # A frozen backbone runs without gradients, so nothing has to be computed again.
    count = train.checkpoint_layers
    adapt_layers(
        loaded.model,
        checkpointing=count not in ("auto", 0) and not options.freeze,
        compiled=False,
        recomputed=count if isinstance(count, int) else None,
    )
    notes = (*loaded.notes, *((f"the head of {model} is used and fitted further",) if predictor.record else ()))
    if np.ptp(reward) == 0:
        notes = (*notes, f"every rollout has the reward {reward[0]:g}, so the predictor can learn only this constant")
    return CheckedFit(
        model=predictor,
        options=options,
        rows=rows,
        target=recursive_targets(ends.tree, reward, leaf_weights(rollouts))[0],
        schedule=_schedule(len(rows), train),
        num_prompts=prefixes.num_groups,
        tokens_alone=tokens_alone(prefixes, nodes),
        origin={"trie_sha256": file_sha256(directory / MANIFEST), "tokenizer": manifest.get("tokenizer")},
        notes=notes,
    )


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


def fit(run: CheckedFit, out: str | AnyPath, *, overwrite: bool = False) -> Iterator[FitStep]:
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


def _entries(run: CheckedFit) -> dict[str, Any]:
    """Return the entries of values.json about the fit."""
    fit_options = {name: getattr(run.options, name) for name in ("capacity", "segment", "prefix_share", "freeze")}
    shared = {name: value for name, value in run.options.train.as_record().items() if name in _SHARED_OPTIONS}
    counts = {"num_prompts": run.num_prompts, "num_anchors": run.num_anchors}
    return {"model": run.model.loaded.source, **run.origin, "options": fit_options | shared, **counts}


def _dtype(run: CheckedFit) -> str:
    return run.options.train.dtype


def _frozen_states(run: CheckedFit) -> Callable[[AnchorRow], Tensor]:
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
    run: CheckedFit, optimiser: torch.optim.Optimizer, number: int, states_of: Callable[[AnchorRow], Tensor]
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
    loss = accumulate(run.model.head, rows, run.target, states_of)
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
