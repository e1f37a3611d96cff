"""Log-probabilities of every trained token under a model, written into a copy of a packed directory.

    packed/, model --open_scoring--> Scoring      unsuitable data and models are refused here
    Scoring --scored_rows--> Row, Row, ...        the same rows, with term_old_logprob or term_ref_logprob filled in
    rows, scored_provenance --write_packed--> packed/

Consecutive rows are one forward pass, in which a prefix is computed once for all trajectories that share it. All terms
of a token get the same value, and it is the value that each trajectory alone would give. With `carry`, longer rows run
in pieces, and each token of them still runs once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treepack.attention import row_multiple
from treepack.carry.backward import runner_of
from treepack.carry.offload import CarryBudget, CarryMemory
from treepack.carry.refusal import check_carry
from treepack.data.batch import make_batch, names_of
from treepack.data.dataset import PackedDataset
from treepack.data.joined import consecutive, join_rows, usual_pass
from treepack.errors import TreepackError
from treepack.files.manifest import Provenance
from treepack.memory.device_memory import free_memory
from treepack.memory.shortage import LOADING, memory_errors
from treepack.model.adapters.lora_options import LoraOptions
from treepack.model.head.token_loss import filled_temperature
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel
from treepack.model.objectives.temperature import refuse_temperatures, temperature_of_terms
from treepack.pack.files import read_rows
from treepack.pack.row import Row
from treepack.train.input_checks import check_terms
from treepack.train.scoring_options import ScoreOptions
from treepack.train.setup.compute import choose_compute
from treepack.train.setup.run_model import check_rows_fit
from treepack.trajectory import Float64

_SMALLER = "--dtype bf16, a smaller --loss-chunk, or rows packed with a smaller --capacity"


@dataclass(frozen=True)
class Scoring:
    """Rows, model and options that fit together; `notes` are for the user.

    `temperature` is that of all terms, or a phrase, see `model.objectives.temperature.temperature_of_terms`. `memory`
    is the budget of carried tensors of rows in pieces, on a GPU.
    """

    dataset: PackedDataset
    loaded: LoadedModel
    options: ScoreOptions
    notes: tuple[str, ...]
    temperature: float | str
    memory: CarryMemory | None = None


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
    with memory_errors(*LOADING):
        loaded = load_model(
            model,
            attention=options.attention,
            dtype=torch.float32,  # as in training, so that the first ratios of a run are 1
            autocast=compute.autocast,
            device=compute.device,
            seed=options.seed,
            lora=lora,
        )
    memory = None
    if options.carry is not None:
        check_carry(loaded)
        memory = carry_memory(loaded.device)
    check_rows_fit(dataset, loaded)
    name = f"term_{options.column}_logprob"
    notes = (f"the column {name} of {packed} is replaced",) if name in dataset.term_columns else ()
    if options.column == "ref" and temperature != 1:
        notes = (*notes, "the reference is computed at the sampler's temperature; for dpo add --ignore-temperature")
    options = replace(options, dtype=compute.dtype)
    return Scoring(dataset, loaded, options, (*loaded.notes, *notes), temperature, memory)


def pass_size(pass_tokens: int | str, piece_size: int | None, device: torch.device) -> int:
    """Return the maximum number of tokens of joined rows: at most the tokens of a piece, if there are pieces."""
    size = usual_pass(device) if isinstance(pass_tokens, str) else pass_tokens
    return size if piece_size is None else min(size, piece_size)


def carry_memory(device: torch.device) -> CarryMemory | None:
    """Return the memory of keys and values of rows in pieces; None on the CPU.

    Keys and values of layers beyond half of the free memory wait on the host; the other half is for a piece's layer and
    logits. The budget changes no result.
    """
    return CarryMemory(device, CarryBudget(stack=free_memory(device) // 2)) if device.type == "cuda" else None


def scored_rows(scoring: Scoring) -> Iterator[Row]:
    """Yield all rows in order, with the log-probabilities of their terms.

    Raises:
        TreepackError: a log-probability is not finite.
    """
    options, loaded = scoring.options, scoring.loaded
    size = pass_size(options.pass_tokens, options.piece_size, loaded.device)
    for rows in consecutive(read_rows(scoring.dataset.path), lambda row: row.num_tokens, size):
        lower = torch.autocast(loaded.device.type, torch.bfloat16, enabled=options.dtype == "bf16")
        remedy = f"score with {'--carry auto' if options.carry is None else 'a smaller --carry'}, {_SMALLER}"
        if len(rows) > 1:
            remedy = f"score with a smaller --pass-tokens, {_SMALLER}"
        name = f"in {names_of([row.row_id for row in rows])} of {sum(row.num_tokens for row in rows):,} tokens"
        with lower, memory_errors(name, remedy):
            read = rows if options.routes == "replay" else [replace(row, routes=None) for row in rows]
            scores = term_scores(loaded, read, options, memory=scoring.memory)
        for row, (logprobs, entropies) in zip(rows, scores, strict=True):
            # A ratio or divergence with such a value would make the loss of its step NaN, much later.
            if not np.isfinite(logprobs).all():
                raise TreepackError(
                    f"{loaded.source}: a log-probability of row {row.row_id} is not finite; inspect the model and the "
                    "row"
                )
            assert row.terms is not None
            columns: dict[str, Any] = {f"{options.column}_logprob": logprobs.astype(np.float32)}
            if options.entropies:
                columns["entropy"] = entropies.astype(np.float32)
            yield replace(row, terms=replace(row.terms, **columns))


@torch.no_grad()
def term_scores(
    loaded: LoadedModel, rows: Sequence[Row], options: ScoreOptions, *, memory: CarryMemory | None = None
) -> list[tuple[Float64, Float64]]:
    """Return log-probabilities and entropies of the terms' tokens, float64 [N] each, row by row of one pass.

    Each token of the rows runs once.
    """
    multiple = row_multiple(loaded.attention)
    batch = join_rows([make_batch(row, multiple=multiple) for row in rows], multiple=multiple)
    terms = batch.terms
    assert terms is not None, "checked when the data was opened"
    if len(terms.tokens) == 0:  # no trained token in these rows: nothing to compute
        return [(np.zeros(0), np.zeros(0)) for _ in rows]
    # One value per trained token, which `index` repeats for its terms: values [-1, -2], index [0, 1, 1] -> [-1, -2, -2]
    tokens = terms.tokens.to(loaded.device)
    temperature = filled_temperature(None if options.ignore_temperature else terms.temperature, options.temperature)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.to(loaded.device)
    # Without gradients all pieces may share the weights that autocast has cast, so they need no contexts of their own.
    runner = runner_of(loaded, batch, options.piece_size, chunk=options.loss_chunk, memory=memory)
    scores = runner.scores(batch, tokens, temperature=temperature)
    assert scores.logprobs is not None
    assert scores.entropies is not None
    columns = (scores.logprobs, scores.entropies)
    logprobs, entropies = (values.double().cpu()[terms.index].numpy() for values in columns)
    edges = (0, len(logprobs)) if batch.edges is None else batch.edges.terms
    return [(logprobs[begin:end], entropies[begin:end]) for begin, end in pairwise(edges)]


def scored_provenance(scoring: Scoring) -> Provenance:
    """Return the provenance of the scored rows: that of the input, and the model that computed each column."""
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
    # Pieces change the order of sums, as dtype and attention do, but only of rows that are cut.
    limit = options.piece_size
    if limit is not None and int(scoring.dataset.num_tokens.max(initial=0)) > limit:
        model["carry"] = limit
    joined = pass_size(options.pass_tokens, options.piece_size, scoring.loaded.device)
    if any(a + b <= joined for a, b in pairwise(scoring.dataset.num_tokens.tolist())):
        model["pass_tokens"] = joined
    logprobs = {**(manifest.get("logprobs") or {}), options.column: model}
    return replace(Provenance.of(manifest), logprobs=logprobs)
