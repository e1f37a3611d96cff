"""The prefix value predictor is fitted: how likely is success from a prompt, or from a prefix of a rollout?

    trie, model, options --open_fit--> Fit     everything that can be refused is refused here
    Fit --fit--> out/                          one FitStep per optimiser step; the directory whole or absent

TRACE (arXiv 2606.11119), section 4.3: the target of a prefix is the share of successes among the rollouts below it
(eq. 18), the loss the mean squared error (eq. 19) over all prompts and a share of the prefixes (appendix E.6). Rows
come from `value_rows`: a token is computed once for all prefixes that it is in. What is fitted is in `value_model`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
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
from treepack.model.layers import adapt_layers
from treepack.rl.trace.targets import anchors, binary_rewards, recursive_targets
from treepack.train.metrics import MetricsLog
from treepack.train.options import TrainOptions
from treepack.train.predictor.model import (
    METRICS,
    ValueModel,
    check_rows,
    end_states,
    memory_errors,
    save_values,
    start_values,
    state_values,
)
from treepack.train.predictor.rows import AnchorRow, anchor_prefixes, anchor_rows, draw_nodes, tokens_alone
from treepack.train.ranks import find_device
from treepack.train.schedule import OptimiserStep, learning_rate
from treepack.trajectory import Float64
from treepack.trie.files import read_trie

USED = frozenset(
    {
        *("epochs", "rows_per_step", "lr", "min_lr_ratio", "warmup_steps", "weight_decay", "betas", "clip"),
        *("dtype", "gradient_checkpointing", "attention", "device", "seed"),
    }
)


@dataclass(frozen=True)
class FitOptions:
    """How to fit; see the command line for the same names.

    `train` holds what `treepack train` has too, of which the options in `USED` are used. The defaults of lr and
    epochs and of `prefix_share`, the share of prefixes among what is supervised, are TRACE's (appendix E.6). `freeze`
    leaves the backbone as it is and fits the head alone.
    """

    train: TrainOptions = field(default_factory=lambda: TrainOptions(lr=3e-5, epochs=2))
    capacity: int = 8192
    segment: str = "turn"
    prefix_share: float = 0.06
    freeze: bool = False

    def __post_init__(self) -> None:
        """Refuse values that make no sense, naming the option."""
        if self.capacity < 1:
            raise TreepackError(f"capacity is {self.capacity}; expected at least 1")
        if not 0 <= self.prefix_share <= 1:
            raise TreepackError(f"prefix_share is {self.prefix_share}; expected 0 to 1")


@dataclass(frozen=True)
class Fit:
    """A checked run: what is supervised, by node of the segment tree, and the rows of every optimiser step."""

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
        """Prompts and prefixes that are supervised."""
        return sum(len(row.node) for row in self.rows)

    @property
    def constant_loss(self) -> float:
        """The loss of one value for all, the mean: what a predictor that tells nothing apart can reach."""
        return float(self.target[np.concatenate([row.node for row in self.rows])].var())


@dataclass(frozen=True)
class FitStep:
    """One optimiser step: `loss` is the mean squared error over its `num_anchors`, before the update."""

    step: int
    epoch: int
    loss: float
    lr: float
    grad_norm: float
    num_rows: int
    num_anchors: int
    tokens: int
    seconds: float


def squared_error(head: nn.Linear, states: Tensor, target: Float64) -> Tensor:
    """Sum of squared differences between the values of `states` [n, D] and `target` [n], a float64 scalar: eq. 19."""
    wanted = torch.from_numpy(target).to(states.device)
    return (state_values(head, states).double() - wanted).square().sum()


def open_fit(trie: str | Path, model: str | Path, options: FitOptions) -> Fit:
    """Read the trie, draw and pack what is supervised, load the model, and refuse what does not fit together.

    Raises:
        TreepackError: rewards other than 0 and 1, a prefix beyond the capacity, a missing device, a damaged trie, or a
            model that does not suit.
    """
    directory, train = Path(trie), options.train
    device, manifest = find_device(train.device), read_manifest(directory, schema.TRIE_FORMAT)
    read = read_trie(directory)
    reward = binary_rewards(read)
    found = anchors(read, segment=options.segment)
    prefixes = anchor_prefixes(read, found)
    nodes = draw_nodes(prefixes, prefix_share=options.prefix_share, seed=train.seed)
    rows = anchor_rows(prefixes, nodes, capacity=options.capacity)
    given = start_values(model, train.dtype, train.attention, device, train.seed)
    loaded = given.loaded
    check_rows(given, rows, manifest.get("tokenizer"), directory)
    adapt_layers(loaded.model, checkpointing=train.gradient_checkpointing and not options.freeze, compiled=False)
    notes = (*loaded.notes, *((f"goes on with the head of {model} too",) if given.record else ()))
    if np.ptp(reward) == 0:
        notes = (*notes, f"every rollout has the reward {reward[0]:g}, so there is nothing to tell apart")
    return Fit(
        model=given,
        options=options,
        rows=rows,
        target=recursive_targets(found.tree, reward)[0],
        schedule=_schedule(len(rows), train),
        num_prompts=prefixes.num_groups,
        tokens_alone=tokens_alone(prefixes, nodes),
        origin={"trie_sha256": file_sha256(directory / MANIFEST), "tokenizer": manifest.get("tokenizer")},
        notes=notes,
    )


def _schedule(num_rows: int, train: TrainOptions) -> list[OptimiserStep]:
    found: list[OptimiserStep] = []
    for epoch in range(train.epochs):
        (part,) = epoch_order([None] * num_rows, range(num_rows), seed=train.seed, epoch=epoch)
        order = part.tolist()
        found += [
            OptimiserStep(epoch, order[i : i + train.rows_per_step]) for i in range(0, num_rows, train.rows_per_step)
        ]
    return found


def fit(run: Fit, out: str | Path, *, overwrite: bool = False) -> Iterator[FitStep]:
    """Fit, yielding after every optimiser step; `out` appears when all steps have been taken.

    Raises:
        TreepackError: `out` is in the way, a loss or gradient is not finite, memory does not suffice, or the disk
            fails.
    """
    loaded, parameters = run.model.loaded, list(run.model.head.parameters())
    if not run.options.freeze:
        parameters = [*loaded.model.base_model.parameters(), *parameters]
        loaded.model.train()  # for checkpointing; every dropout is 0
    optimiser = _optimiser(parameters, run.options.train)
    states_of = _frozen_states(run) if run.options.freeze else lambda row: end_states(loaded, row, dtype=_dtype(run))
    with finished_directory(Path(out), overwrite=overwrite) as temporary:
        with MetricsLog(temporary / METRICS, keep_until=None) as log:
            for number in range(len(run.schedule)):
                step = _fit_step(run, optimiser, number, states_of)
                log.write(asdict(step))
                yield step
        loaded.model.eval()
        save_values(run.model, temporary, _entries(run))


def _entries(run: Fit) -> dict[str, Any]:
    own = {name: getattr(run.options, name) for name in ("capacity", "segment", "prefix_share", "freeze")}
    shared = {name: value for name, value in run.options.train.as_record().items() if name in USED}
    counts = {"num_prompts": run.num_prompts, "num_anchors": run.num_anchors}
    return {"model": run.model.loaded.source, **run.origin, "options": own | shared, **counts}


def _dtype(run: Fit) -> str:
    return run.options.train.dtype


def _frozen_states(run: Fit) -> Callable[[AnchorRow], Tensor]:
    """`end_states` of a backbone that does not change: each row is computed once."""
    kept: dict[int, Tensor] = {}

    def states_of(row: AnchorRow) -> Tensor:
        if row.row.row_id not in kept:
            with torch.no_grad():
                kept[row.row.row_id] = end_states(run.model.loaded, row, dtype=_dtype(run))
        return kept[row.row.row_id]

    return states_of


def _optimiser(parameters: Sequence[nn.Parameter], train: TrainOptions) -> torch.optim.AdamW:
    """AdamW; biases and norms, which have one dimension, do not decay."""
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=train.lr, betas=train.betas)


def _fit_step(
    run: Fit, optimiser: torch.optim.Optimizer, number: int, states_of: Callable[[AnchorRow], Tensor]
) -> FitStep:
    """Optimiser step `number`, counted from 0."""
    began, step, train = time.perf_counter(), run.schedule[number], run.options.train
    rows = [run.rows[i] for i in step.rows]
    lr = learning_rate(train, number, len(run.schedule))
    for group in optimiser.param_groups:
        group["lr"] = lr
    optimiser.zero_grad(set_to_none=True)
    loss = accumulate(run.model.head, rows, run.target, states_of)
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, train.clip or math.inf))
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise TreepackError(
            f"the loss or gradient of step {number + 1} is not finite; lower --lr, or see whether the model computes "
            "finite hidden states"
        )
    optimiser.step()
    computed = [] if run.options.freeze and step.epoch else rows
    return FitStep(
        step=number + 1,
        epoch=step.epoch,
        loss=loss,
        lr=lr,
        grad_norm=norm,
        num_rows=len(rows),
        num_anchors=sum(len(row.node) for row in rows),
        tokens=sum(row.row.num_tokens for row in computed),
        seconds=time.perf_counter() - began,
    )


def accumulate(
    head: nn.Linear, rows: Sequence[AnchorRow], target: Float64, states_of: Callable[[AnchorRow], Tensor]
) -> float:
    """Mean squared error over all prefixes of `rows`, one mean whatever the rows are; its gradients are added up.

    `target` float64 [num_inner] is by node, `states_of` gives the hidden states of a row as `end_states` does.
    """
    denominator = sum(len(row.node) for row in rows)
    losses = []
    for row in rows:
        with memory_errors(row):
            loss = squared_error(head, states_of(row), target[row.node]) / denominator
            torch.autograd.backward(loss)
        losses.append(loss.detach())
    return float(torch.stack(losses).sum())
