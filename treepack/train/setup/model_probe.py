"""Measurement of a model before its first step: bytes and seconds of passes over a few made-up sequences.

model, a row --probe_model--> ModelProbe        whole rows, with every layer recomputed, half of them, and none
ModelProbe --agreed--> ModelProbe               the cautious numbers of all ranks, so that all of them choose one plan

Each length runs twice: with few logits at a time for its memory, then with a chunk of them for its time. Logits would
hide the memory of layers in such short passes, and hardly matter in long ones. Before them one pass compiles, kernels
in threads. A longer pass runs only if the shorter ones took hardly longer than the processor needs to start them, and
if it fits by them: ranks of a sharded model meet in every layer, so a rank that runs out of memory inside a pass would
leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from treepack.data.batch import Batch, empty_batch
from treepack.memory.device_memory import MemoryMeter
from treepack.model.experts.weights import cast_once
from treepack.model.forward import WholeRows
from treepack.model.layers import adapted_layers, find_layers, recomputed_layers
from treepack.model.loaded import LoadedModel
from treepack.train.ranks import Ranks
from treepack.train.setup.kernel_threads import compile_in_threads
from treepack.train.setup.run_plan import ModelProbe

# Targets whose logits are in memory in passes that measure memory.
FEW_LOGITS = 128
# Tokens of the passes. From the two longest, a straight line gives the bytes of a token. None is the size of a layer
# (64, 2048, ...), for which torch.compile would make code of its own.
LENGTHS = (192, 2176, 4736, 9344, 18560)
_BUSY = 1.5  # the time of a pass whose kernels are measured, in starts of a pass
_LONG = 6  # the same of a compiled pass: a longer one would tell no more
_CHAIN = 64  # tokens of each of their sequences: every model has these positions
# Logits of a target, their softmax and their gradient, in float32.
_LOGIT_BYTES = 12
# Ranks compare integers of 64 bits: seconds in picoseconds, and bytes of a token in parts of 1,024.
_UNITS = {"seconds_kept": 1e12, "seconds_recomputed": 1e12, "launch": 1e12, "kept": 1024.0, "recomputed": 1024.0}
# Of these the smallest number promises least.
_SAVINGS = ("spared", "covered")


def probe_model(
    loaded: LoadedModel,
    batch: Batch,
    *,
    compiled: bool,
    chunk: int,
    autocast: Callable[[], AbstractContextManager[Any]],
    meter: MemoryMeter,
    fits: Callable[[int], bool],
    on_any: Callable[[bool], bool] = bool,
    lengths: Sequence[int] = LENGTHS,
    plain: ModelProbe | None = None,
    counts: Sequence[int] | None = None,
    casts: int = 0,
) -> ModelProbe:
    """Measure forward and backward passes with every layer recomputed, with half of them, and with none.

    All ranks of a sharded model must call this. Gradients of parameters exist in the end; weights and random generators
    are as before.

    Args:
        loaded: the model, whose layers `adapt_layers` has adapted if it can recompute them.
        batch: any row, whose tokens are used again and again.
        compiled: True if the layers are compiled.
        chunk: targets whose logits are in memory at a time.
        autocast: makes the context of a forward pass.
        meter: memory and clock.
        fits: returns True if so many bytes are free, on all ranks.
        on_any: returns True if its argument is True on any rank.
        lengths: tokens of the passes, ascending; the first one is so short that it takes the time of a start.
        plain: the probe of the same layers without compilation; only the two longest passes that fit by it run.
        counts: numbers of recomputed layers to measure, each a graph; by default all and 0, else `plain` replaces one.
        casts: as in `ModelProbe`.

    Raises:
        RuntimeError: memory is too small for a pass of few tokens.
    """
    adapted = adapted_layers(loaded.causal)
    count = 0 if adapted is None else len(adapted.modules)
    known = {number: _Passes() for number in counts or (count, 0)}  # of each number of recomputed layers
    chosen = {number: lengths if plain is None else _longest(lengths, plain, number, fits) for number in known}
    if plain is not None and len(known) > 1:
        chosen[0] = chosen[0][-1:]  # one pass beside the line of recomputed ones
    few, training = min(chunk, FEW_LOGITS), loaded.model.training
    logits = _LOGIT_BYTES * int(loaded.causal.get_input_embeddings().weight.shape[0])
    runners = [WholeRows(loaded, targets, autocast) for targets in (few, chunk)]
    loaded.model.train()
    devices = [loaded.device] if loaded.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            if plain is None:
                tree = star(batch, lengths[0])
                compile_in_threads(loaded.device, lambda: _measured(runners[-1], tree, meter))
                loaded.model.zero_grad(set_to_none=True)
            for number, length in enumerate(lengths):
                if number > 2 and plain is None and not on_any(known[count].waits):
                    break
                for recomputed, passes in known.items():
                    if length not in chosen[recomputed]:
                        continue
                    more = (min(chunk, length) - few) * logits
                    if plain is None and len(passes.bytes) > 1 and not fits(passes.predicted(length) + more):
                        continue
                    with recomputed_layers(loaded.causal, recomputed):
                        passes.measure(runners, batch, length, meter)
            between = 0
            if len(known) > 1 and count > 1:
                with recomputed_layers(loaded.causal, count // 2):
                    between, _ = _measured(runners[0], chains(batch, known[0].longest), meter)
    finally:
        loaded.model.train(training)
    return ModelProbe(
        compiled=compiled,
        num_layers=count,
        chunk=few,
        logits=logits,
        covered=min(each.covered((min(chunk, each.longest) - few) * logits) for each in known.values()),
        casts=casts,
        **_numbers_of(known, count, between, casts, plain),
    )


def _numbers_of(
    known: dict[int, _Passes], count: int, between: int, casts: int, plain: ModelProbe | None
) -> dict[str, Any]:
    """Return the bytes and seconds of a probe; `between` is the peak with half of the layers recomputed, or 0."""
    first, half = next(iter(known)), count // 2
    fixed = max(0, known[first].line[0] - (0 if first else casts))  # only layers that keep activations keep casts
    rates = {count: 1.0, 0: 1.0} if plain is None else {count: plain.recomputed, 0: plain.kept}
    for number, each in known.items():
        rates[number] = max(1.0, (each.bytes[each.longest] - fixed - (0 if number else casts)) / each.longest)
    spared = rates[0] - rates[count] if plain is None or len(known) > 1 else plain.spared
    if between:  # without the casts of half of the layers
        spared = (known[0].bytes[known[0].longest] - between - casts * half / count) / known[0].longest / half
    best = {number: min(time / length for length, time in each.seconds.items()) for number, each in known.items()}
    again = 1.0 if plain is None else plain.seconds_recomputed / plain.seconds_kept
    return {
        "fixed": fixed,
        "kept": rates[0],
        "spared": max(0.0, spared),
        "recomputed": rates[count],
        # Memory may be too small for a pass of many tokens that are kept.
        "seconds_kept": min(best.values()) if 0 in best else best[count] / again,
        "seconds_recomputed": best[count] if count in best else best[0] * again,
        "launch": known[0].start if plain is None else plain.launch,
    }


class _Passes:
    """Peaks and times of passes with one number of recomputed layers, by tokens: `bytes` with few logits at a time."""

    def __init__(self) -> None:
        self.bytes, self.seconds = dict[int, int](), dict[int, float]()
        self.with_logits = 0  # peak of the last pass with a chunk of logits

    @property
    def start(self) -> float:
        """Seconds of the shortest pass."""
        return self.seconds[min(self.seconds)]

    @property
    def waits(self) -> bool:
        """True if the passes so far took hardly longer than a start."""
        return max(self.seconds.values()) < _BUSY * self.start

    @property
    def longest(self) -> int:
        """Tokens of the longest pass."""
        return max(self.bytes)

    @property
    def line(self) -> tuple[int, float]:
        """Bytes without tokens and bytes of each token, from the peaks of the two longest passes."""
        # {1024: 2_048_000, 3072: 4_096_000} -> 1000 for each token, and 1_024_000 without tokens
        short, long = sorted(self.bytes)[-2:]
        per_token = max(1.0, (self.bytes[long] - self.bytes[short]) / (long - short))
        return max(0, int(self.bytes[short] - short * per_token)), per_token

    def predicted(self, length: int) -> int:
        """Return the peak of a pass by the shorter ones."""
        return int(self.line[0] + length * self.line[1])

    def measure(self, runners: Sequence[WholeRows], batch: Batch, length: int, meter: MemoryMeter) -> None:
        """Run passes of `length` tokens; `runners` have few logits in memory, and a chunk of them."""
        row = chains(batch, length)
        if not self.bytes:  # this pass compiles
            _measured(runners[-1], row, meter)
        self.bytes[length], _ = _measured(runners[0], row, meter)
        self.with_logits, self.seconds[length] = _measured(runners[-1], row, meter)

    def covered(self, logits: int) -> float:
        """Return how many of the bytes of more logits are free again when a layer needs most, per token."""
        return max(0.0, (logits - max(0, self.with_logits - self.bytes[self.longest])) / self.longest)


def _measured(runner: WholeRows, row: Batch, meter: MemoryMeter) -> tuple[int, float]:
    """Run a pass over a row; return its peak in bytes and its seconds."""
    start, before = meter.clock(), meter.allocated()
    meter.reset()
    with cast_once(keep=runner.loaded.root is None):
        runner.backward(row)
    return max(0, meter.peak() - before), meter.clock() - start


def cast_bytes(causal: Any) -> int:
    """Return the bytes in 16 bits of the products' float32 weights in the layers.

    Compiled layers cast them in their own code and keep the casts; without compilation autocast keeps them in any case.
    """
    weights = (each.weight for layer in find_layers(causal) for each in layer.modules() if isinstance(each, nn.Linear))
    return sum(2 * weight.numel() for weight in weights if weight.dtype == torch.float32)


def _longest(lengths: Sequence[int], plain: ModelProbe, recomputed: int, fits: Callable[[int], bool]) -> Sequence[int]:
    """Return the two longest passes that fit by an earlier probe, and are not too long; else the two shortest."""
    long = _LONG * plain.launch / plain.seconds(recomputed)
    few = [length for length in lengths if length <= long]
    fitting = [length for length in few if fits(plain.pass_bytes(length, recomputed, plain.chunk))]
    return (fitting if len(fitting) > 1 else lengths[:2])[-2:]


def chains(batch: Batch, length: int) -> Batch:
    """Return a row of sequences of `_CHAIN` tokens with the tokens of a row, all of them trained."""
    # Length 6 in sequences of 3: positions [0 1 2 0 1 2], parent [-1 0 1 -1 3 4], subtree_end [3 3 3 6 6 6]
    tokens = torch.arange(length)
    position = tokens % _CHAIN
    return replace(
        empty_batch(length),
        input_ids=batch.input_ids.cpu()[tokens % max(1, batch.num_tokens)],
        position_ids=position,
        parent=torch.where(position == 0, -1, tokens - 1),
        subtree_end=((tokens // _CHAIN + 1) * _CHAIN).clamp(max=length).int(),
        scale=torch.ones(length, dtype=torch.int32),
        loss_weight=(position > 0).double(),
        num_tokens=length,
    )


def star(batch: Batch, length: int) -> Batch:
    """Return a row of one tree with the tokens of a row, a prompt and eight branches, that launches every kernel."""
    # Length 48: a prompt of 32 tokens, branches 32 33, 34 35, ... of 2: parent of 34 is 31 and of 35 is 34
    prompt, tokens = _CHAIN // 2, torch.arange(length)
    branch = max(1, (length - prompt) // 8)
    inside = torch.where(tokens < prompt, tokens, (tokens - prompt) % branch)
    in_prompt = tokens < prompt
    return replace(
        chains(batch, length),
        position_ids=torch.where(in_prompt, tokens, prompt + inside),
        parent=torch.where(~in_prompt & (inside == 0), prompt - 1, tokens - 1),
        subtree_end=torch.where(in_prompt, length, (tokens - inside + branch).clamp(max=length)).int(),
        loss_weight=(tokens > 0).double(),
    )


def agreed(probe: ModelProbe, ranks: Ranks) -> ModelProbe:
    """Return the most cautious number of any rank for each measured number; all ranks must call this."""
    values: dict[str, Any] = {}
    for each in fields(probe):
        value = getattr(probe, each.name)
        if each.name in _SAVINGS:
            values[each.name] = ranks.smallest(int(value * 1024)) / 1024
        elif each.name in _UNITS:
            values[each.name] = -ranks.smallest(-int(value * _UNITS[each.name])) / _UNITS[each.name]
        elif each.name in ("fixed", "casts"):
            values[each.name] = -ranks.smallest(-value)
    return replace(probe, **values)
