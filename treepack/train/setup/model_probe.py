"""Measurement of a model before its first step: bytes and seconds of passes over a few made-up sequences.

model, a row --probe_model--> ModelProbe        whole rows, with every layer recomputed and with none
ModelProbe --agreed--> ModelProbe               the cautious numbers of all ranks, so that all of them choose one plan

Each pass has two peaks, until the gradients reach the last layer and after that (`fit.pass_memory`). Before them one
pass compiles, kernels in threads. A longer pass runs only if the shorter ones took hardly longer than the processor
needs to start them, and if it fits by them: ranks of a sharded model meet in every layer, so a rank that runs out of
memory inside a pass would leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from treepack.data.batch import Batch, empty_batch
from treepack.fit.kernel_threads import compile_in_threads
from treepack.fit.pass_memory import ModelProbe, PeakBytes
from treepack.memory.device_memory import MemoryMeter
from treepack.model.experts.weights import cast_once
from treepack.model.forward import WholeRows
from treepack.model.layers import find_layers, num_adapted, recomputed_layers
from treepack.model.loaded import LoadedModel
from treepack.train.options import CHUNK
from treepack.train.ranks import Ranks

# Tokens of the passes. From the two longest, a straight line gives the bytes of a token. None is the size of a layer
# (64, 2048, ...), for which torch.compile would make special code.
LENGTHS = (192, 2176, 4736, 9344, 18560)
_BUSY = 1.5  # the time of a pass whose kernels are measured, in starts of a pass
_LONG = 6  # the same of a compiled pass: a longer one would tell no more
_CHAIN = 64  # tokens of each of their sequences: every model has these positions
_LOGIT_BYTES = 12  # of a target, at most: logits, their softmax and their gradient in float32
# Ranks compare integers of 64 bits: seconds in picoseconds, and bytes of a token in parts of 1,024.
_SECONDS, _BYTES = 1e12, 1024.0


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
    """Measure forward and backward passes with every layer recomputed and with none.

    All ranks of a sharded model must call this. Gradients of parameters exist in the end; weights and random generators
    are as before.

    Args:
        loaded: the model, whose layers `adapt_layers` has adapted if it can recompute them.
        batch: any row, whose tokens are used again and again.
        compiled: True if the layers are compiled.
        chunk: targets whose logits are in memory at a time; no more than `CHUNK` are measured.
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
    count = num_adapted(loaded.causal)
    chunk = min(chunk, CHUNK)
    logits = _LOGIT_BYTES * int(loaded.causal.get_input_embeddings().weight.shape[0])
    known = {number: _Passes(chunk, logits) for number in counts or (count, 0)}  # by number of recomputed layers
    chosen = {number: lengths if plain is None else _longest(lengths, plain, number, fits) for number in known}
    if plain is not None and len(known) > 1:
        chosen[0] = chosen[0][-1:]  # one pass beside the line of recomputed ones
    runner, training = WholeRows(loaded, chunk, autocast), loaded.model.training
    loaded.model.train()
    try:
        with torch.random.fork_rng(devices=[loaded.device] if loaded.device.type == "cuda" else []):
            if plain is None:
                tree = star(batch, lengths[0])
                compile_in_threads(loaded.device, lambda: _measured(runner, tree, meter))
                loaded.model.zero_grad(set_to_none=True)
            for number, length in enumerate(lengths):
                if number > 2 and plain is None and not on_any(known[count].waits):
                    break
                for recomputed, passes in known.items():
                    if length not in chosen[recomputed]:
                        continue
                    if plain is None and len(passes.seconds) > 1 and not fits(passes.predicted(length)):
                        continue
                    with recomputed_layers(loaded.causal, recomputed):
                        passes.measure(runner, batch, length, meter)
    finally:
        loaded.model.train(training)
    return _as_probe(known, count, logits, casts, plain, compiled=compiled)


def _as_probe(
    known: dict[int, _Passes], count: int, logits: int, casts: int, plain: ModelProbe | None, *, compiled: bool
) -> ModelProbe:
    """Return the probe of passes by number of recomputed layers; arguments as in `probe_model` and `_peak`."""

    def peak(name: str) -> PeakBytes:
        measured = {number: getattr(each, name) for number, each in known.items()}
        return _peak(measured, count, casts, None if plain is None else getattr(plain, name))

    seconds_kept, seconds_recomputed = _seconds(known, count, plain)
    return ModelProbe(
        compiled=compiled,
        num_layers=count,
        logits=logits,
        forward=peak("forward"),
        backward=peak("backward"),
        seconds_kept=seconds_kept,
        seconds_recomputed=seconds_recomputed,
        launch=known[0].start if plain is None else plain.launch,
        casts=casts,
    )


def _peak(measured: dict[int, dict[int, int]], count: int, casts: int, plain: PeakBytes | None) -> PeakBytes:
    """Return the line of a peak: the first number of recomputed layers gives the bytes beside the tokens.

    Args:
        measured: bytes of passes by number of recomputed layers and by tokens.
        count: number of layers.
        casts: as in `ModelProbe`; only layers that keep activations keep casts.
        plain: the peak of layers without compilation.
    """
    first = next(iter(measured))
    fixed = _line(measured[first])[0] - (0 if first else casts)
    rates = {count: 1.0, 0: 1.0} if plain is None else {count: plain.recomputed, 0: plain.kept}
    for number, sizes in measured.items():
        longest = max(sizes)
        rates[number] = max(1.0, (sizes[longest] - fixed - (0 if number else casts)) / longest)
    return PeakBytes(fixed, rates[0], rates[count])


def _seconds(known: dict[int, _Passes], count: int, plain: ModelProbe | None) -> tuple[float, float]:
    """Return the seconds of a token if all layers keep their activations, and if all run again."""
    best = {number: min(time / length for length, time in each.seconds.items()) for number, each in known.items()}
    again = 1.0 if plain is None else plain.seconds_recomputed / plain.seconds_kept
    # Memory may be too small for a pass of many tokens that are kept.
    kept = min(best.values()) if 0 in best else best[count] / again
    return kept, best[count] if count in best else best[0] * again


def _line(sizes: Mapping[int, float]) -> tuple[int, float]:
    """Return the bytes without tokens and the bytes of each token, from the peaks of the two longest passes."""
    # {1024: 2_048_000, 3072: 4_096_000} -> 1000 for each token, and 1_024_000 without tokens
    short, long = sorted(sizes)[-2:]
    per_token = max(1.0, (sizes[long] - sizes[short]) / (long - short))
    return int(sizes[short] - short * per_token), per_token


class _Passes:
    """Peaks and times of passes with one number of recomputed layers, by tokens; `forward` is beside the logits."""

    def __init__(self, chunk: int, logits: int) -> None:
        """Start without passes; a pass has the logits of `chunk` targets, each of `logits` bytes, at a time."""
        self.chunk, self.logits = chunk, logits
        self.forward, self.backward, self.seconds = dict[int, int](), dict[int, int](), dict[int, float]()

    @property
    def start(self) -> float:
        """Seconds of the shortest pass."""
        return self.seconds[min(self.seconds)]

    @property
    def waits(self) -> bool:
        """True if the passes so far took hardly longer than a start."""
        return max(self.seconds.values()) < _BUSY * self.start

    def predicted(self, length: int) -> int:
        """Return the peak of a pass by the shorter ones."""
        forward, backward = (
            fixed + length * per_token for fixed, per_token in (_line(self.forward), _line(self.backward))
        )
        return int(max(forward + min(self.chunk, length) * self.logits, backward))

    def measure(self, runner: WholeRows, batch: Batch, length: int, meter: MemoryMeter) -> None:
        """Run a pass of `length` tokens; before the first one, the same pass compiles."""
        row = chains(batch, length)
        if not self.seconds:
            _measured(runner, row, meter)
        forward, self.backward[length], self.seconds[length] = _measured(runner, row, meter)
        self.forward[length] = forward - min(self.chunk, length) * self.logits


def _measured(runner: WholeRows, row: Batch, meter: MemoryMeter) -> tuple[int, int, float]:
    """Run a pass over a row; return its two peaks, both of the whole pass without layers, and its seconds."""
    peaks = list[int]()

    def reached(_: Tensor) -> None:
        if not peaks:
            peaks.append(meter.peak())
            meter.reset()

    def watch(_layer: nn.Module, _arguments: Any, output: Any) -> None:
        states = output if isinstance(output, Tensor) else output[0]
        if states.requires_grad:
            states.register_hook(reached)

    handles = [layer.register_forward_hook(watch) for layer in find_layers(runner.loaded.causal)[-1:]]
    start, before = meter.clock(), meter.allocated()
    meter.reset()
    try:
        with cast_once(keep=runner.loaded.root is None):
            runner.backward(row)
    finally:
        for handle in handles:
            handle.remove()
    peaks.append(meter.peak())
    return max(0, peaks[0] - before), max(0, peaks[-1] - before), meter.clock() - start


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
    fitting = [length for length in few if fits(plain.pass_bytes(length, recomputed, CHUNK))]
    return (fitting if len(fitting) > 1 else lengths[:2])[-2:]


def chains(batch: Batch, length: int, size: int = _CHAIN) -> Batch:
    """Return a row of sequences of `size` tokens with the tokens of a row, all of them trained."""
    # Length 6 in sequences of 3: positions [0 1 2 0 1 2], parent [-1 0 1 -1 3 4], subtree_end [3 3 3 6 6 6]
    tokens = torch.arange(length)
    position = tokens % size
    return replace(
        empty_batch(length),
        input_ids=batch.input_ids.cpu()[tokens % max(1, batch.num_tokens)],
        position_ids=position,
        parent=torch.where(position == 0, -1, tokens - 1),
        subtree_end=((tokens // size + 1) * size).clamp(max=length).int(),
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

    def largest(value: float, unit: float) -> float:
        return ranks.largest(int(value * unit)) / unit

    def cautious(peak: PeakBytes) -> PeakBytes:
        kept, recomputed = (largest(each, _BYTES) for each in (peak.kept, peak.recomputed))
        return PeakBytes(ranks.largest(peak.fixed), kept, recomputed)

    return replace(
        probe,
        forward=cautious(probe.forward),
        backward=cautious(probe.backward),
        casts=ranks.largest(probe.casts),
        seconds_kept=largest(probe.seconds_kept, _SECONDS),
        seconds_recomputed=largest(probe.seconds_recomputed, _SECONDS),
        launch=largest(probe.launch, _SECONDS),
    )
