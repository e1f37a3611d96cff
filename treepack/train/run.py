"""A training run as a value: data, model and options that fit together; `setup.opening.open_run` makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from treepack.carry.offload import CarryMemory
from treepack.costs.recurrent_cost import count_scans
from treepack.data.mixture import AnyDataset, source_of_rows, sources_of
from treepack.memory.device_memory import StepMemory
from treepack.model.experts.active import num_active_weights
from treepack.model.experts.router_balance import RouterBalance
from treepack.model.loaded import LoadedModel
from treepack.objectives.denominators import TrajectoryTable, step_factors, trainable_rows
from treepack.train.division import Division
from treepack.train.options import TrainOptions
from treepack.train.passes import Joining, Pass, deal
from treepack.train.ranks import Ranks
from treepack.train.schedule import OptimiserStep
from treepack.trajectory import Float64

Packed: TypeAlias = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class TrainingRun:
    """A checked training run: data, model, options, and the rows of every optimiser step.

    `files` are the files of the saved model without its weights, by name (`saved_files`).
    `rewards` is the sum of the known rewards of every row's trajectories and their number, float64 [num_rows, 2].
    `held_out` are rows to evaluate on, with a schedule of one step that has all of them. `balance` computes the
    auxiliary loss of routers, if `options.router_aux` asks for it. `division` has the rows of each machine, if the
    machines read blocks of their own. `memory` is the memory of the device, if it is measured, and `carry_memory` its
    part for keys and values that rows in pieces carry. `choices` are lines about the plan of its memory. `teacher`
    scores each row before its forward pass (`teacher.taught`).
    """

    dataset: AnyDataset
    loaded: LoadedModel
    options: TrainOptions
    schedule: list[OptimiserStep]
    files: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    table: TrajectoryTable | None = None
    ranks: Ranks = field(default_factory=Ranks)
    rewards: Float64 | None = None
    held_out: TrainingRun | None = None
    balance: RouterBalance | None = None
    division: Division | None = None
    memory: StepMemory | None = None
    carry_memory: CarryMemory | None = None
    choices: tuple[str, ...] = ()
    teacher: LoadedModel | None = None

    @property
    def paths(self) -> list[str | Path]:
        """The packed directories that the run reads, including held-out rows."""
        paths: list[str | Path] = [source.path for source in sources_of(self.dataset)]
        return paths if self.held_out is None else paths + self.held_out.paths

    @property
    def constant_means(self) -> frozenset[str]:
        """Means of the objective that the data alone determines, so that they are not shown."""
        objective, columns = self.options.objective, self.dataset.term_columns
        constant = set()
        if objective.old_logprobs == "sampler":
            constant = {"old_kl"}  # it is sampler_kl
        elif "term_old_logprob" not in columns:
            constant = {"ratio", "clip_fraction_low", "clip_fraction_high", "old_kl"}  # every ratio is 1
        if not objective.value_clip or "term_old_value" not in columns:
            constant.add("value_clip_fraction")
        return frozenset(constant)

    def mean_reward(self, rows: list[int]) -> float | None:
        """Return the mean of the known rewards of the trajectories of `rows`; None if none is known."""
        if self.rewards is None:
            return None
        total, count = self.rewards[rows].sum(0).tolist()
        return total / count if count else None

    @property
    def trainable_rows(self) -> list[int]:
        """Rows (indices into the dataset) that contribute to the loss."""
        return [int(row) for row in trainable_rows(self.dataset, self.table)]

    def factors(self, rows: list[int]) -> list[Tensor | None]:
        """Return the loss factors of the `rows` of one optimiser step: float64 [trajectories], None for sft."""
        if self.table is None:
            return [None] * len(rows)
        return [torch.from_numpy(values) for values in step_factors(self.table, rows, self.options.objective)]

    def passes(self, rows: Sequence[int]) -> list[Pass]:
        """Return the passes that this rank runs of the `rows` of a step; see `passes.deal`."""
        share, shares = self.ranks.row_share
        return deal(rows, self.costs(), shares, self._joining(), self.division)[share]

    def _joining(self) -> Joining:
        options, dataset = self.options, self.dataset
        assert options.pass_tokens != "auto", "open_run chooses a number"
        limit = int(options.pass_tokens)
        if options.piece_limit is not None:
            limit = min(limit, options.piece_limit)  # longer passes do not fit
        # Rows with other columns of terms are not joined. sft reads no terms.
        columns = [source.term_columns if source.terms else () for source in sources_of(dataset)]
        kind_of = {names: kind for kind, names in enumerate(dict.fromkeys(columns))}
        kinds = np.array([kind_of[names] for names in columns], np.int64)[source_of_rows(dataset)]
        return Joining(limit, dataset.num_tokens, kinds)

    def costs(self) -> Float64:
        """Return the floating-point operations of the layers in the forward pass of every row; float64 [num_rows].

        They decide which rows run side by side on several ranks, so their ratios matter and not their unit.
        """
        linear, pairs = row_operations(self.loaded, self.dataset)
        costs: Float64 = linear + pairs
        return costs


def row_operations(loaded: LoadedModel, dataset: AnyDataset) -> tuple[Float64, Float64]:
    """Return the operations of the layers in the forward pass of every row, without attention and of its pairs.

    Both are float64 [num_rows].
    """
    causal = loaded.causal
    config = causal.config.get_text_config()
    # Frozen weights too: they cost as much forward.
    weights = num_active_weights(causal)
    weights -= causal.get_input_embeddings().weight.numel()  # a lookup, not a product
    # A recurrent layer has no pairs: the cost of its state is a number per token, like that of a weight.
    weights += count_scans(config.to_dict(), loaded.source)
    tokens, pairs = dataset.num_tokens, dataset.num_pairs
    # 2 operations per weight and token. A pair of query and key costs 2 D in q k^T and 2 D_v in p v.
    linear: Float64 = 2.0 * weights * tokens
    attention: Float64 = np.zeros(len(tokens))
    for kind in loaded.kinds:
        # In a window, a token has at most as many pairs as the window has tokens.
        seen = pairs if kind.reach is None else np.minimum(pairs, kind.reach.size * tokens)
        attention = attention + 2.0 * config.num_attention_heads * sum(kind.head_dims) * seen
    return linear, attention
