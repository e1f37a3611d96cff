"""The values of a critic after every token of a trie, written into a copy of the trie: `treepack critic` as a function.

    trie/, model --open_critic--> Critic      unsuitable data and models are refused here
    Critic --critic_values--> float64 [N_tree], one value for each tree token
    values --write_values--> out/             the column `token_values` of the nodes

The trie is planned into rows in memory, and consecutive rows are one forward pass without gradients. Every tree token
gets one value, and it is the value that each trajectory through it alone would have. A tree that fits a row runs each
of its tokens once. A larger tree takes several rows, which compute their common prefixes again: the value of the first
row is written, and the others equal it except for rounding. With `carry`, each tree is in one row, which runs in
pieces, so every tree token runs once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treepack.attention import row_multiple
from treepack.carry.backward import runner_of
from treepack.carry.offload import CarryMemory
from treepack.carry.refusal import check_carry
from treepack.data.batch import Batch, make_batch
from treepack.data.joined import join_rows
from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.directory import finished_directory, refuse_existing
from treepack.files.input_files.inputs import displayed
from treepack.files.lock import lock
from treepack.files.manifest import Manifest, Provenance, read_manifest, trie_entry
from treepack.files.prepared import TRIE, prepared_part
from treepack.files.remote.address import AnyPath, as_output, as_path
from treepack.files.remote.cache import local_copy, naming_addresses
from treepack.fit.rung import RunPlan
from treepack.model.accept.compatibility import check_fits
from treepack.model.accept.vocabulary import NO_CRITIC
from treepack.model.adapters.adapter import base_of
from treepack.model.experts.replay import check_routes
from treepack.model.head.value_head import read_value_head
from treepack.model.load import read_config
from treepack.model.loaded import LoadedModel
from treepack.pack.capacity import usual_capacities
from treepack.pack.placement import RowPlacer
from treepack.pack.plan.planning import plan_rows
from treepack.pack.row import Row
from treepack.processes import ReportProgress, with_progress
from treepack.train.forward_passes import ForwardPasses, forward_plan, load_frozen
from treepack.train.scoring_options import CriticOptions
from treepack.train.setup.compute import ComputeSetting, choose_compute
from treepack.trajectory import Float64, Int64
from treepack.trie.store.token_values import write_token_values
from treepack.trie.store.trie_files import read_trie
from treepack.trie.trie import Trie


@dataclass(frozen=True)
class Critic:
    """A trie, the trajectories of each row of its plan, and a model with a value head that fit together."""

    trie: Trie
    members: list[Int64]
    loaded: LoadedModel
    options: CriticOptions

    @cached_property
    def passes(self) -> ForwardPasses:
        """The passes over the rows, with the plan of today."""
        return ForwardPasses(self.loaded, forward_plan(self.options, self.loaded.device))


@dataclass(frozen=True, slots=True)
class _CriticSummary:
    """A trie with values that was written: its directory and manifest, and the values with their counts.

    `num_computed` is the number of tokens of all rows, and `tokens_flat` that of all trajectories. `replaced` is True
    if the trie had values.
    """

    path: AnyPath
    manifest: Manifest
    values: Float64
    num_rows: int
    num_computed: int
    tokens_flat: int
    attention: str
    notes: tuple[str, ...]
    replaced: bool


def _open_critic(trie: Trie, model: str | Path, options: CriticOptions, *, tokenizer: Any = None) -> Critic:
    """Plan the rows of a trie, load the model with its value head, and check that they fit together.

    `tokenizer` is the entry of the trie's manifest.

    Raises:
        TreepackError: the device is missing, a trajectory is longer than the capacity, the model has no saved value
            head, it does not fit the trie, or it cannot replay the recorded experts.
    """
    compute = choose_compute(options)
    base = base_of(model, None)[0]
    if all(read_value_head(source) is None for source in (model, base)):
        read_config(base)  # refuses a directory that is not a model
        raise TreepackError(f"{model}: {NO_CRITIC}")
    members = plan_rows(trie, capacity=_capacity(trie, options), method="contiguous").members()
    loaded = load_frozen(model, options, compute, value_head=True)
    if options.routes == "replay" and trie.routes is not None:
        check_routes(loaded.causal, loaded.source, torch.from_numpy(np.asarray(trie.routes[:1])))
    if options.carry is not None:
        check_carry(loaded)
    check_fits(
        loaded,
        max_token_id=int(trie.tokens.max(initial=0)),
        tokenizer=tokenizer,
        max_position=int(trie.lengths.max(initial=1)) - 1,
    )
    return Critic(trie, members, loaded, replace(options, dtype=compute.dtype))


def _capacity(trie: Trie, options: CriticOptions) -> int:
    """Return the tokens of a row: with `carry` at least as long as the largest tree."""
    if options.capacity is not None:
        return options.capacity
    usual = usual_capacities(trie)[0]
    if options.carry is None:
        return usual
    # Roots 0 and 3 with node_start [0, 2, 4, 5, 9] -> trees of 5 and 4 tokens
    roots = np.append(trie.node_start[np.flatnonzero(trie.parent < 0)], trie.tokens_tree)
    return max(usual, int(np.diff(roots).max(initial=1)))


def critic_values(critic: Critic) -> Iterator[tuple[Int64, Float64]]:
    """Yield for each row the places of its tokens in `Trie.tokens`, and the value after each; [n] each.

    A place that several rows have comes with each of them.

    Raises:
        TreepackError: a value is not finite, or memory is too small.
    """
    loaded, options = critic.loaded, critic.options
    places: dict[int, Int64] = {}  # of each row that waits or runs

    def compute(rows: Sequence[Batch], plan: RunPlan, memory: CarryMemory | None) -> list[Float64]:
        batch = join_rows(rows, multiple=row_multiple(loaded.attention))
        with torch.no_grad(), ComputeSetting(loaded.device, options.dtype).lower_precision():
            values = runner_of(loaded, batch, plan.carry, memory=memory).values(batch).double().cpu().numpy()
        return np.split(values, np.cumsum([row.num_tokens for row in rows])[:-1])

    for row, values in critic.passes.results(_placed_rows(critic, places), compute):
        if not np.isfinite(values).all():
            raise TreepackError(f"{loaded.source}: a value of row {row.row_id} is not finite; inspect the critic")
        yield places.pop(row.row_id), values


def _placed_rows(critic: Critic, places: dict[int, Int64]) -> Iterator[Batch]:
    """Yield each row, and write the places of its tokens in `Trie.tokens` into `places`."""
    placer = RowPlacer(critic.trie)
    routes = critic.trie.routes if critic.options.routes == "replay" else None
    for number, members in enumerate(critic.members):
        nodes = placer.place(members)
        places[number] = nodes.source
        row = Row(
            row_id=number,
            step=None,
            loss_weight=np.zeros(len(nodes.source)),
            trajectory_ids=[],
            trajectory_groups=[],
            terms=None,
            routes=None if routes is None else routes[nodes.source],
            **placer.columns(nodes),
        )
        yield make_batch(row, multiple=row_multiple(critic.loaded.attention))


@naming_addresses()
def write_values(
    trie: str | AnyPath,
    model: str,
    out: str | AnyPath,
    options: CriticOptions = CriticOptions(),  # noqa: B008 (immutable)
    *,
    overwrite: bool = False,
    progress: ReportProgress | None = None,
) -> _CriticSummary:
    """Compute the value after every token of a trie directory, and write them with the trie to the directory `out`.

    Args:
        trie: a trie directory, an output of `treepack prepare`, or the address of a trie.
        model: a model directory, address or hub name with a value head, or an adapter with one.
        out: the directory to write, or an address; it appears when it is complete.
        options: rows, pieces and precision.
        overwrite: replace `out` if treepack wrote it.
        progress: called with the rows computed so far.

    Raises:
        TreepackError: as `_open_critic` and `critic_values`, or `out` cannot be written.
    """
    trie, out = prepared_part(as_path(trie), TRIE), as_output(out)
    refuse_existing(out, overwrite=overwrite, inputs=[trie, model])
    with lock(out):
        source = local_copy(trie)
        manifest = read_manifest(source, schema.TRIE_FORMAT)
        critic = _open_critic(read_trie(source), model, options, tokenizer=manifest.get("tokenizer"))
        values, num_computed = np.full(critic.trie.tokens_tree, np.nan), 0
        rows = with_progress(
            critic_values(critic), progress, "computing values", unit="rows", total=len(critic.members)
        )
        for places, own in rows:
            num_computed += len(places)
            # Values [1, nan, nan] and a row of the places 0 and 2 -> only place 2 is written.
            new = np.isnan(values[places])
            values[places[new]] = own[new]
        provenance = replace(
            Provenance.of(manifest),
            critic=_recorded(critic),
            trie=trie_entry(source, displayed(str(trie))),
        )
        with finished_directory(out, overwrite=overwrite) as temporary:
            written = write_token_values(source, temporary, values, provenance)
    return _CriticSummary(
        path=out,
        manifest=written,
        values=values,
        num_rows=len(critic.members),
        num_computed=num_computed,
        tokens_flat=critic.trie.tokens_flat,
        attention=critic.loaded.attention,
        notes=critic.loaded.notes,
        replaced="critic" in manifest,
    )


def _recorded(critic: Critic) -> dict[str, Any]:
    """Return the entry of the manifest: the model, and options that change the rounding of values."""
    options, loaded, plan = critic.options, critic.loaded, critic.passes.plan
    record: dict[str, Any] = {"model": loaded.source, "dtype": options.dtype, "attention": loaded.attention}
    if options.routes != "replay" and critic.trie.routes is not None:
        record["routes"] = options.routes
    if plan.carry is not None:
        return {**record, "carry": plan.carry}
    if len(critic.members) > 1:
        record["pass_tokens"] = plan.pass_tokens
    return record
