"""Log-probabilities of every trained token under a model, written into a copy of a packed directory.

    packed/, model --open_scoring--> Scoring      unsuitable data and models are refused here
    Scoring --scored_rows--> Row, Row, ...        the same rows, with the log-probabilities filled in, and with the
                                                  likeliest words of a teacher at each token
    rows, scored_provenance --write_packed--> packed/

Consecutive rows are one forward pass, in which a prefix is computed once for all trajectories that share it. All terms
of a token get the same value, and it is the value that each trajectory alone would give. With `carry`, longer rows run
in pieces, and each token of them still runs once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from treepack.attention import row_multiple
from treepack.carry.backward import runner_of
from treepack.carry.offload import CarryMemory
from treepack.carry.refusal import check_carry
from treepack.columns import BY_NAME
from treepack.data.batch import make_batch
from treepack.data.dataset import PackedDataset
from treepack.data.joined import join_rows
from treepack.errors import TreepackError
from treepack.files.manifest import Provenance
from treepack.fit.rung import RunPlan
from treepack.model.adapters.lora_options import LoraOptions
from treepack.model.head.output_head import find_head
from treepack.model.head.token_loss import filled_temperature
from treepack.model.loaded import LoadedModel
from treepack.objectives.row_numbers import ScoreRequest
from treepack.objectives.temperature import refuse_temperatures, temperature_of_terms
from treepack.pack.files import read_rows
from treepack.pack.row import Row
from treepack.ragged import RaggedArray, join_lists
from treepack.sequence.share import share_rows
from treepack.train.forward_passes import ForwardPasses, forward_plan, load_frozen
from treepack.train.input_checks import check_terms
from treepack.train.scoring_options import ScoreOptions, piece_size
from treepack.train.setup.compute import ComputeSetting, choose_compute
from treepack.train.setup.run_model import check_rows_fit
from treepack.trajectory import Float32, Float64, Int64


class _TermScores(NamedTuple):
    """Numbers about the N terms of a row: log-probabilities and entropies float64 [N], and likeliest words [N, K]."""

    logprobs: Float64
    entropies: Float64
    words: Int64 | None = None
    word_logprobs: Float64 | None = None


@dataclass(frozen=True)
class Scoring:
    """Rows, model and options that fit together; `notes` are for the user.

    `temperature` is that of all terms, or a phrase, see `objectives.temperature.temperature_of_terms`.
    """

    dataset: PackedDataset
    loaded: LoadedModel
    options: ScoreOptions
    notes: tuple[str, ...]
    temperature: float | str

    @cached_property
    def passes(self) -> ForwardPasses:
        """The passes over the rows, with the plan of today."""
        return ForwardPasses(self.loaded, forward_plan(self.options, self.loaded.device))


def open_scoring(packed: str | Path, model: str | Path, options: ScoreOptions) -> Scoring:
    """Open the data, load the model, and check that they fit together.

    Raises:
        TreepackError: the data has no terms or is damaged, the device is missing, or the model does not fit the data.
    """
    compute, dataset = choose_compute(options), PackedDataset(packed)
    check_terms(dataset)
    if not options.ignore_temperature:
        refuse_temperatures([dataset], options.temperature)
    temperature = 1.0 if options.ignore_temperature else temperature_of_terms(dataset, options.temperature)
    lora = None if options.quantize is None else LoraOptions(quantize=options.quantize)
    # The dtype is that of training, so that the first ratios of a run are 1.
    loaded = load_frozen(model, options, compute, dtype=torch.float32, seed=options.seed, lora=lora)
    if options.sequence_ranks > 1:
        share_rows(loaded.causal, torch.distributed.group.WORLD)
    if options.carry is not None:
        check_carry(loaded)
    check_rows_fit(dataset, loaded)
    name = f"term_{options.column}_logprob"
    notes: tuple[str, ...] = ()
    if name in dataset.term_columns:
        kept = "" if options.groups is None else f" where the group matches {options.groups}"
        notes = (f"the column {name} of {packed} is replaced{kept}",)
    if options.column == "ref" and temperature != 1:
        notes = (*notes, "the reference is computed at the sampler's temperature; for dpo add --ignore-temperature")
    if (words := find_head(loaded.causal).out_features) < (options.top_k or 0):
        notes = (*notes, f"the model has {words:,} words, so --top-k {options.top_k:,} writes all of them")
        options = replace(options, top_k=words)
    options = replace(options, dtype=compute.dtype)
    return Scoring(dataset, loaded, options, (*loaded.notes, *notes), temperature)


def scored_rows(scoring: Scoring) -> Iterator[Row]:
    """Yield all rows in order, with the log-probabilities of their terms.

    Raises:
        TreepackError: a log-probability is not finite, or memory is too small.
    """
    options, loaded = scoring.options, scoring.loaded

    def compute(rows: Sequence[Row], plan: RunPlan, memory: CarryMemory | None) -> list[_TermScores]:
        read = rows if options.routes == "replay" else [replace(row, routes=None) for row in rows]
        chosen = replace(options, carry=plan.carry, loss_chunk=plan.loss_chunk)
        with ComputeSetting(loaded.device, options.dtype).lower_precision():
            return term_scores(loaded, read, chosen, memory=memory)

    for row, found in scoring.passes.results(read_rows(scoring.dataset.path), compute):
        # A ratio or divergence with such a value would make the loss of its step NaN, much later.
        if not np.isfinite(found.logprobs).all():
            raise TreepackError(
                f"{loaded.source}: a log-probability of row {row.row_id} is not finite; inspect the model and the row"
            )
        yield _with_scores(row, found, options)


def _with_scores(row: Row, found: _TermScores, options: ScoreOptions) -> Row:
    """Return a row with the columns of the options, filled in for the groups of the options."""
    terms = row.terms
    assert terms is not None
    matches = [options.groups is None or re.match(options.groups, group) for group in row.trajectory_groups]
    own = np.array([match not in (None, False) for match in matches], np.bool_)[terms.trajectory]

    def merged(name: str, values: Float64) -> Float32:
        known = getattr(terms, name)
        return np.where(own, values, np.nan if known is None else known).astype(np.float32)

    columns: dict[str, Any] = {
        f"{options.column}_logprob": merged(f"{options.column}_logprob", found.logprobs),
    }
    if options.entropies:
        columns["entropy"] = merged("entropy", found.entropies)
    if options.column == "teacher":
        # Words of an earlier teacher do not belong to the new log-probabilities.
        for name, lists in (("teacher_topk_ids", found.words), ("teacher_topk_logprobs", found.word_logprobs)):
            columns[name] = _merged_lists(getattr(terms, name), lists, own, name)
    return replace(row, terms=replace(terms, **columns))


def _merged_lists(
    known: RaggedArray | None, lists: NDArray[Any] | None, own: NDArray[np.bool_], name: str
) -> RaggedArray | None:
    """Return the lists [N, K] of the terms in `own`, or none, and known ones of the others; None if all are empty."""
    dtype = BY_NAME[name].kind.dtype
    every = RaggedArray.empty(len(own), dtype) if known is None else known
    if lists is not None:
        new = RaggedArray(lists.astype(dtype).ravel(), np.arange(len(own) + 1) * lists.shape[1])
    else:
        new = RaggedArray.empty(len(own), dtype)
    merged = join_lists([every, new])[np.arange(len(own)) + len(own) * own]
    return merged if len(merged.flat) or lists is not None or known is not None else None


@torch.no_grad()
def term_scores(
    loaded: LoadedModel, rows: Sequence[Row], options: ScoreOptions, *, memory: CarryMemory | None = None
) -> list[_TermScores]:
    """Return the numbers about the terms' tokens, row by row of one pass.

    Each token of the rows runs once.
    """
    multiple = row_multiple(loaded.attention)
    batch = join_rows([make_batch(row, multiple=multiple) for row in rows], multiple=multiple)
    terms = batch.terms
    assert terms is not None, "checked when the data was opened"
    if len(terms.tokens) == 0:  # no trained token in these rows: nothing to compute
        none = None if options.top_k is None else np.zeros((0, options.top_k), np.int64)
        return [_TermScores(np.zeros(0), np.zeros(0), none, none if none is None else none.astype(float)) for _ in rows]
    # One value per trained token, which `index` repeats for its terms: values [-1, -2], index [0, 1, 1] -> [-1, -2, -2]
    tokens = terms.tokens.to(loaded.device)
    temperature = filled_temperature(None if options.ignore_temperature else terms.temperature, options.temperature)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.to(loaded.device)
    # Without gradients all pieces may share the weights that autocast has cast, so they need no contexts of their own.
    runner = runner_of(loaded, batch, piece_size(options.carry), chunk=options.loss_chunk, memory=memory)
    kept = None if options.ignore_temperature else terms.kept_ids
    kept = kept if kept is None else kept.map(lambda each: each.to(loaded.device))
    reads = ScoreRequest(top_k=options.top_k or 0)
    scores = runner.scores(batch, tokens, reads, temperature=temperature, kept=kept)
    columns = (scores.logprobs, scores.entropies, scores.top_words, scores.top_logprobs)
    found = [None if each is None else each.double().cpu()[terms.index].numpy() for each in columns]
    edges = (0, len(terms.index)) if batch.edges is None else batch.edges.terms
    return [
        _TermScores(*(None if each is None else each[begin:end] for each in found))  # type: ignore[arg-type]
        for begin, end in pairwise(edges)
    ]


def scored_provenance(scoring: Scoring) -> Provenance:
    """Return the provenance of the scored rows: that of the input, and the model that computed each column.

    Call it after the last row, because the plan may get smaller until then.
    """
    manifest, options = scoring.dataset.manifest, scoring.options
    model: dict[str, Any] = {
        "model": scoring.loaded.source,
        "dtype": options.dtype,
        "attention": scoring.loaded.attention,
    }
    if options.quantize is not None:
        model["quantize"] = options.quantize
    if options.routes != "replay" and scoring.dataset.has_routes:
        model["routes"] = options.routes
    if scoring.temperature != 1:
        model["temperature"] = scoring.temperature
    if "term_kept_ids" in scoring.dataset.term_columns and not options.ignore_temperature:
        model["kept_sets"] = True
    # Pieces change the order of sums, as dtype and attention do, but only of rows that are cut.
    limit = scoring.passes.plan.carry
    if limit is not None and int(scoring.dataset.num_tokens.max(initial=0)) > limit:
        model["carry"] = limit
    joined = scoring.passes.plan.pass_tokens
    if any(a + b <= joined for a, b in pairwise(scoring.dataset.num_tokens.tolist())):
        model["pass_tokens"] = joined
    known = manifest.get("logprobs") or {}
    if options.top_k is not None:
        model["top_k"] = options.top_k
    if options.groups is not None:
        model |= {"groups": options.groups, "others": known.get(options.column)}
    logprobs = {**known, options.column: model}
    return replace(Provenance.of(manifest), logprobs=logprobs)
