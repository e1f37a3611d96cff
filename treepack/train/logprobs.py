"""Log-probabilities of every trained token under a model, written into a copy of a packed directory.

    packed/, model --open_scoring--> Scoring      unsuitable data and models are refused here
    Scoring --scored_rows--> Row, Row, ...        the same rows, with term_old_logprob or term_ref_logprob filled in
    rows, scored_provenance --write_packed--> packed/

Consecutive rows are one forward pass, in which a prefix is computed once for all trajectories that share it. All terms
of a token get the same value, and it is the value that each trajectory alone would give. With `carry`, longer rows run
in pieces, and each token of them still runs once.
"""

from __future__ import annotations

import math
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
from treepack.data.joined import check_pass_tokens, consecutive, join_rows, usual_pass
from treepack.errors import TreepackError
from treepack.files.manifest import Provenance
from treepack.memory.device_memory import free_memory
from treepack.memory.shortage import LOADING, memory_errors
from treepack.model.accept.compatibility import check_fits, position_limit
from treepack.model.adapters.adapter import LoraOptions
from treepack.model.head.token_loss import CHUNK, filled_temperature
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel
from treepack.model.objectives.objective import GREEDY
from treepack.model.objectives.temperature import refuse_temperatures, temperature_of_terms
from treepack.pack.files import read_rows
from treepack.pack.row import Row
from treepack.train.ranks import find_device, find_dtype
from treepack.train.setup.opening import check_attention
from treepack.trajectory import Float64

_SMALLER = "--dtype bf16, a smaller --loss-chunk, or rows packed with a smaller --capacity"

# Tokens of a piece with `carry` "auto". Longer pieces are no faster: without gradients each token runs once in any way.
AUTO_PIECE = 8192
COLUMNS = ("old", "ref")  # the columns term_old_logprob and term_ref_logprob


@dataclass(frozen=True)
class ScoreOptions:
    """The columns to write and options of the model.

    `column` "old" is the denominator of the ratios of `train --loss`, "ref" the reference of its KL divergences and of
    dpo. With `entropies` the column term_entropy is written too. Both are about softmax(logits / temperature), at the
    temperatures of the data; `temperature` is for terms without one, 1 by default. With `ignore_temperature` it is 1
    for all terms, which dpo needs. `quantize` rounds the model as `LoraOptions` do. Rows of more than `carry` tokens
    run in pieces of at most that many; "auto" is `AUTO_PIECE`, and None runs every row as a whole. Consecutive rows are
    joined into passes of at most `pass_tokens` tokens; "auto" is `data.joined.usual_pass`, and 1 joins none. `routes`,
    `dtype`, `attention`, `loss_chunk`, `device` and `seed` are as in `train.options.TrainOptions`.
    """

    column: str = "old"
    entropies: bool = False
    quantize: str | None = None
    temperature: float | None = None
    ignore_temperature: bool = False
    carry: int | str | None = None
    pass_tokens: int | str = "auto"
    routes: str = "replay"
    dtype: str = "auto"
    attention: str = "auto"
    loss_chunk: int = CHUNK
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse invalid values.

        Raises:
            TreepackError: with the name of the option.
        """
        choices_of = {"column": COLUMNS, "routes": ("replay", "ignore"), "dtype": ("auto", "fp32", "bf16")}
        for name, choices in choices_of.items():
            if getattr(self, name) not in choices:
                raise TreepackError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(choices)}")
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise TreepackError(f"temperature is {self.temperature}; expected a finite number above 0{GREEDY}")
        if self.carry not in (None, "auto") and not (isinstance(self.carry, int) and self.carry >= 1):
            raise TreepackError(f"carry is {self.carry!r}; expected a number of tokens of at least 1, auto or None")
        check_pass_tokens(self.pass_tokens)
        if self.temperature is not None and self.ignore_temperature:
            raise TreepackError("temperature and ignore_temperature exclude each other; omit one of them")

    @property
    def piece_size(self) -> int | None:
        """The tokens of a piece; None if every row runs as a whole."""
        return AUTO_PIECE if isinstance(self.carry, str) else self.carry

    def pass_size(self, device: torch.device) -> int:
        """Return the maximum number of tokens of joined rows, of which none runs in pieces."""
        return pass_size(self.pass_tokens, self.piece_size, device)


@dataclass(frozen=True)
class Scoring:
    """Rows, model and options that fit together; `notes` are for the user.

    `temperature` is that of all terms, or a phrase, see `model.objectives.temperature.temperature_of_terms`. `memory`
    is the budget of what rows in pieces carry, on a GPU.
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
    device, dataset = find_device(options.device), PackedDataset(packed)
    options = replace(options, dtype=find_dtype(options.dtype, device))
    autocast = torch.bfloat16 if options.dtype == "bf16" else None
    check_attention(options.attention, device, autocast or torch.float32)
    if "term_token" not in dataset.term_columns:
        raise TreepackError(
            f"{packed}: its rows have no terms to write log-probabilities for; give the rollouts rewards or "
            "advantages and pack them again"
        )
    if not options.ignore_temperature:
        refuse_temperatures([dataset], options.temperature)
    temperature = 1.0 if options.ignore_temperature else temperature_of_terms(dataset, options.temperature)
    lora = None if options.quantize is None else LoraOptions(quantize=options.quantize)
    with memory_errors(*LOADING):
        loaded = load_model(
            model,
            attention=options.attention,
            dtype=torch.float32,  # as in training, so that the first ratios of a run are 1
            autocast=autocast,
            device=device,
            seed=options.seed,
            lora=lora,
        )
    memory = None
    if options.carry is not None:
        check_carry(loaded)
        memory = carry_memory(loaded.device)
    # Reads a column of all rows, so only for models that have a maximum position.
    positions = dataset.max_position() if position_limit(loaded.causal) else 0
    check_fits(
        loaded,
        max_token_id=dataset.manifest["max_token_id"],
        tokenizer=dataset.manifest.get("tokenizer"),
        max_position=positions,
    )
    name = f"term_{options.column}_logprob"
    notes = (f"the column {name} of {packed} is replaced",) if name in dataset.term_columns else ()
    if options.column == "ref" and temperature != 1:
        notes = (*notes, "the reference is computed at the sampler's temperature; for dpo add --ignore-temperature")
    return Scoring(dataset, loaded, options, (*loaded.notes, *notes), temperature, memory)


def pass_size(pass_tokens: int | str, piece_size: int | None, device: torch.device) -> int:
    """Return the maximum number of tokens of joined rows: at most those of a piece, if there are pieces."""
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
    size = options.pass_size(loaded.device)
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
    """Return the log-probability and the entropy of each term's token, float64 [N], for each row of one pass.

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
    joined = options.pass_size(scoring.loaded.device)
    if any(a + b <= joined for a, b in pairwise(scoring.dataset.num_tokens.tolist())):
        model["pass_tokens"] = joined
    logprobs = {**(manifest.get("logprobs") or {}), options.column: model}
    return replace(Provenance.of(manifest), logprobs=logprobs)
