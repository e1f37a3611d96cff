"""Measurement of a model before its first step: bytes and seconds of passes over made-up sequences.

    TrialPasses --probe_model--> ModelProbe         every layer recomputed, and then few that keep their activations
    TrialPasses, ModelProbe --probe_compiled--> ModelProbe      compiled layers, by the graphs of the chosen rung alone

Each pass has two peaks, until the gradients reach the last layer and after that (`pass_memory`). Two short passes give
the bytes of a token; then one runs that takes about a second at most, if it fits by them. No pass is tried that might
not fit: ranks of a sharded model meet in every layer, so a rank that ran out of memory inside a pass would leave the
others waiting. All ranks get the most cautious numbers of any rank, so all of them choose one rung.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from treepack.data.batch import Batch, empty_batch
from treepack.fit.kernel_threads import compile_in_threads
from treepack.fit.pass_memory import ModelProbe, PeakBytes, slower
from treepack.memory.device_memory import MemoryMeter
from treepack.model.experts.weights import cast_once
from treepack.model.forward import WholeRows
from treepack.model.layers import find_layers, num_adapted, recomputed_layers
from treepack.model.loaded import LoadedModel

# Tokens of the passes. None is the size of a layer (64, 2048, ...), for which torch.compile would make special code.
LENGTHS = (192, 2176, 4736, 9344, 18560)
# Layers that keep their activations in a pass, to read the bytes of one: the layers of a hybrid differ, and mostly
# repeat after four. They need up to this factor of the bytes of a pass whose layers all run again.
_FEW, _MORE = 8, 4
_LONG = 1.0  # seconds of the longest pass
_CHAIN = 64  # tokens of each of their sequences: every model has these positions
_LOGIT_BYTES = 12  # of a target, at most: logits, their softmax and their gradient in float32
_PICOSECONDS = 1e12  # ranks compare integers


class _Trial(NamedTuple):
    """A pass: its tokens, its two peaks beside the logits, and its seconds."""

    tokens: int
    forward: int
    backward: int
    seconds: float


@dataclass(frozen=True)
class TrialPasses:
    """A model that is measured.

    Attributes:
        loaded: the model, whose layers `adapt_layers` has adapted if it can recompute them.
        batch: any row, whose tokens are used again and again.
        chunk: targets whose logits are in memory at a time.
        autocast: makes the context of a forward pass.
        meter: memory and clock.
        largest: returns the largest of a number on all ranks.
    """

    loaded: LoadedModel
    batch: Batch
    chunk: int
    autocast: Callable[[], AbstractContextManager[Any]]
    meter: MemoryMeter
    largest: Callable[[int], int] = int

    @property
    def num_layers(self) -> int:
        """Layers that can be recomputed."""
        return num_adapted(self.loaded.causal)

    @property
    def logits(self) -> int:
        """The bytes of a target's logits."""
        return _LOGIT_BYTES * int(self.loaded.causal.get_input_embeddings().weight.shape[0])

    def fits(self, num_bytes: float) -> bool:
        """Return True if so many bytes are free on all ranks."""
        return not self.largest(int(num_bytes > 0.95 * self.meter.free()))

    def run(self, row: Batch) -> tuple[int, int, float]:
        """Run a pass over a row; return its two peaks and its seconds."""
        training = self.loaded.model.training
        self.loaded.model.train()  # transformers recomputes layers only in this mode
        try:
            with torch.random.fork_rng(devices=[self.loaded.device] if self.loaded.device.type == "cuda" else []):
                return _measured(WholeRows(self.loaded, self.chunk, self.autocast), row, self.meter)
        finally:
            self.loaded.model.train(training)

    def measure(self, tokens: int, recomputed: int) -> _Trial:
        """Return a pass of `tokens` tokens, whose first `recomputed` layers run again."""
        with recomputed_layers(self.loaded.causal, recomputed):
            forward, backward, seconds = self.run(chains(self.batch, tokens))
        forward -= min(self.chunk, tokens) * self.logits
        numbers = [self.largest(each) for each in (forward, backward, int(seconds * _PICOSECONDS))]
        return _Trial(tokens, numbers[0], numbers[1], numbers[2] / _PICOSECONDS)


def probe_model(passes: TrialPasses) -> ModelProbe:
    """Measure layers as they are; all ranks of a sharded model must call this.

    Gradients of parameters exist in the end; weights and random generators are as before.

    Raises:
        RuntimeError: memory is too small for a pass of few tokens.
    """
    count, device = passes.num_layers, passes.loaded.device
    compile_in_threads(device, lambda: passes.run(star(passes.batch, LENGTHS[0])))
    passes.loaded.model.zero_grad(set_to_none=True)
    passes.measure(LENGTHS[0], count)  # makes the gradients, and compiles what the threads have left
    pair = [passes.measure(length, count) for length in LENGTHS[:2]]
    probe = _straight(passes, pair, compiled=False)

    def fits(length: int, factor: float) -> bool:
        return passes.fits(factor * probe.pass_bytes(length, count, passes.chunk))

    # The first pass has fewer logits than a chunk, which need less than assumed, so its line is too flat for long rows:
    # the next pass is judged by the second one alone.
    if fits(LENGTHS[1], LENGTHS[2] / LENGTHS[1]):
        long = LENGTHS[1] * _LONG / pair[1].seconds
        pair = [pair[1], passes.measure(LENGTHS[2], count)]
        probe = _straight(passes, pair, compiled=False)
        for length in reversed(LENGTHS[3:]):
            if length <= long and fits(length, _MORE):
                pair = [pair[1], passes.measure(length, count)]
                probe = _straight(passes, pair, compiled=False)
                break
    tokens = pair[1].tokens if fits(pair[1].tokens, _MORE) else max(LENGTHS[1], pair[0].tokens)
    few = passes.measure(tokens, max(0, count - _FEW))
    return _with_kept(probe, few, min(_FEW, count))


def probe_compiled(passes: TrialPasses, plain: ModelProbe, recomputed: int, *, casts: int = 0) -> ModelProbe:
    """Measure compiled layers of which the first `recomputed` run again: no other graph is compiled.

    Args:
        passes: the model, with compiled layers; all ranks of a sharded model must call this.
        plain: the probe of the same layers without compilation, which has the bytes of the passes that do not run.
        recomputed: layers that run again.
        casts: as in `ModelProbe`.
    """
    fitting = [
        n for n in LENGTHS[2:] if n <= plain.tokens and passes.fits(plain.pass_bytes(n, recomputed, passes.chunk))
    ]
    lengths = (LENGTHS[:2] + tuple(fitting))[-2:]
    passes.measure(lengths[0], recomputed)  # compiles
    kept = plain.num_layers - recomputed
    own = round(casts * kept / max(1, plain.num_layers))
    trials = [passes.measure(length, recomputed) for length in lengths]
    # The first pass of a length may compile again, and the GPU's memory is mapped in it.
    again = passes.measure(lengths[1], recomputed)
    seconds = min(trial.seconds / trial.tokens for trial in (*trials, again)) * lengths[1]
    pair = [_Trial(each.tokens, each.forward - own, each.backward - own, seconds) for each in trials]
    probe = replace(_straight(passes, pair, compiled=True), casts=casts)
    known = "recomputed" if kept else "kept"  # the bytes of layers that did not run
    peaks = {name: getattr(probe, name) for name in ("forward", "backward")}
    for name, peak in peaks.items():
        peaks[name] = replace(peak, **{known: getattr(getattr(plain, name), known)})
    probe = replace(probe, **peaks)
    if kept:
        return _with_kept(probe, pair[1], kept)
    return replace(probe, seconds_kept=seconds / lengths[1] / slower(recomputed, recomputed))


def _straight(passes: TrialPasses, pair: list[_Trial], *, compiled: bool) -> ModelProbe:
    """Return the probe of two passes, with the same bytes of a token whatever layers do."""

    def line(name: str) -> PeakBytes:
        # {1024: 2_048_000, 3072: 4_096_000} -> 1000 for each token, and 1_024_000 without tokens
        short, long = (getattr(trial, name) for trial in pair)
        of_token = max(1.0, (long - short) / (pair[1].tokens - pair[0].tokens))
        return PeakBytes(int(short - pair[0].tokens * of_token), of_token, of_token)

    return ModelProbe(
        compiled, passes.num_layers, passes.logits, pair[1].tokens, line("forward"), line("backward"), 0.0
    )


def _with_kept(probe: ModelProbe, trial: _Trial, kept: int) -> ModelProbe:
    """Return the probe with the bytes and seconds of a pass in which `kept` layers keep their activations.

    The bytes of the other kept layers follow by one division.
    """
    forward, backward = probe.forward, probe.backward
    now = [
        max(1.0, (of_all - peak.fixed) / trial.tokens)
        for of_all, peak in zip(trial[1:3], (forward, backward), strict=True)
    ]
    layer = max(0.0, now[0] - forward.recomputed) / max(1, kept)
    rest = probe.num_layers - kept
    return replace(
        probe,
        forward=replace(forward, kept=forward.recomputed + probe.num_layers * layer),
        backward=replace(backward, kept=now[1] + rest * layer),
        seconds_kept=trial.seconds / trial.tokens / slower(rest, probe.num_layers),
    )


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
