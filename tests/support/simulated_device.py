"""A GPU that is simulated on the CPU: bytes and seconds of passes by a formula, for runs that measure themselves.

    with simulated(device, causal):      counts the tokens of every pass of the model
        ... device.meter                 the MemoryMeter that a planner reads

A pass over n tokens has a peak of fixed + n * (kept or recomputed) bytes, and takes launch + n * seconds. With `layer`,
layers keep and free bytes as those of a real pass (`LayerBytes`), which has its second peak after the gradients have
gone through a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from treepack.fit.measure import LENGTHS
from treepack.memory.device_memory import MemoryMeter
from treepack.model.layers import adapted_layers, find_layers


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of a token: that a kept layer keeps and a recomputed one, and that the end and a recomputation need."""

    kept: float
    input: float
    end: float
    again: float

    def forward(self, recomputed: int, layers: int) -> float:
        """Return the bytes of a token when the gradients reach the last layer."""
        return recomputed * self.input + (layers - recomputed) * self.kept + self.end

    def backward(self, recomputed: int, layers: int) -> float:
        """Return the bytes of a token while the first layer runs again, or before that if it is more."""
        inputs = recomputed * self.input
        return inputs + max((layers - recomputed) * self.kept, self.again if recomputed else 0)

    def peak(self, recomputed: int, layers: int) -> float:
        """Return the bytes of a token of the whole pass."""
        return max(self.forward(recomputed, layers), self.backward(recomputed, layers))


@dataclass
class SimulatedDevice:
    """The device; `allocated` bytes exist outside of passes, and `free` of `total` may be allocated."""

    free: int
    total: int = 0
    fixed: int = 1_000_000
    kept: float = 2_000.0
    recomputed: float = 500.0
    seconds: float = 1e-4
    again: float = 1.25  # times as long with every layer recomputed
    launch: float = 0.01
    allocated: int = 0
    passes: int = 0
    longest: int = 0  # tokens of a pass
    layer: LayerBytes | None = None
    head: int = 0  # more bytes beside the tokens until the gradients reach the last layer

    def __post_init__(self) -> None:
        """Start the clock."""
        self._now, self._peak, self._later = 0.0, 0, 0

    @property
    def meter(self) -> MemoryMeter:
        """The memory and the clock of the device."""
        return MemoryMeter(
            allocated=lambda: self.allocated,
            peak=lambda: self.allocated + self._peak,
            reset=self._reset,
            free=lambda: self.free,
            total=self.total,
            clock=lambda: self._now,
        )

    def run(self, causal: Any, tokens: int) -> None:
        """Count a pass."""
        adapted = adapted_layers(causal)
        share = 0.0 if adapted is None else adapted.recomputed / len(adapted.modules)
        forward = backward = self.kept + share * (self.recomputed - self.kept)
        if self.layer is not None and adapted is not None:
            numbers = adapted.recomputed, len(adapted.modules)
            forward, backward = self.layer.forward(*numbers), self.layer.backward(*numbers)
        num_bytes, self._later = (int(self.fixed + tokens * each) for each in (forward, backward))
        num_bytes += self.head
        if max(num_bytes, self._later) > self.free:
            raise torch.OutOfMemoryError(f"{num_bytes} bytes for {tokens} tokens")
        self._peak = max(self._peak, num_bytes)
        self._now += max(self.launch, tokens * self.seconds * (1 + share * (self.again - 1)))
        self.passes += 1
        self.longest = max(self.longest, tokens)

    def go_back(self) -> None:
        """Count the peak of the backward pass through the layers."""
        self._peak = max(self._peak, self._later)

    def _reset(self) -> None:
        self._peak = 0


@dataclass(frozen=True)
class ScriptedMemory:
    """Bytes of a token in the passes of `probe_model`, whose order is known, and `free` bytes of each rank.

    Another process takes `taken` bytes of each rank after `steps` steps. Nothing is attached to the model, so the
    processes of several ranks can use it.
    """

    free: tuple[int, ...]
    kept: float
    recomputed: float
    steps: int = 0
    taken: tuple[int, ...] = ()
    total: int = 0

    def meter(self, rank: int, done: Sequence[Any] = ()) -> MemoryMeter:
        """Return the meter of a rank, whose steps so far are in `done`; every pass takes a millisecond."""
        peaks, times = count(), count()

        def peak() -> int:
            if done:
                return 0  # of a step
            # The first length twice and the second with every layer recomputed, then with none; each with two peaks.
            number = next(peaks) // 2
            return int(LENGTHS[number > 1] * (self.kept if number > 2 else self.recomputed))

        def free() -> int:
            return self.free[rank] - (self.taken[rank] if self.taken and len(done) >= self.steps else 0)

        return MemoryMeter(lambda: 0, peak, lambda: None, free, self.total, lambda: next(times) / 1000)


@dataclass(frozen=True)
class ScriptedShortage:
    """An allocation that fails on one rank, at the `number`-th pass through the last layer, counted from 1.

    With `backward` it is in the backward pass; with `forward` only passes without gradients count.
    """

    rank: int
    number: int
    backward: bool = False
    forward: bool = False

    def attach(self, causal: Any) -> None:
        """Let it fail in passes of this model, on its rank."""
        calls = count(1)

        def fail(*_: Any) -> None:
            if next(calls) == self.number:
                raise torch.OutOfMemoryError("no memory")

        def hook(*call: Any) -> None:
            output = call[-1] if isinstance(call[-1], torch.Tensor) else call[-1][0]
            if not self.backward:
                if not (self.forward and torch.is_grad_enabled()):
                    fail()
            elif output.requires_grad:
                output.register_hook(fail)

        causal.base_model.layers[-1].register_forward_hook(hook)


@contextmanager
def simulated(device: SimulatedDevice, causal: Any) -> Iterator[None]:
    """Count every pass of the model in the block."""
    layers = causal.base_model
    handle = layers.register_forward_pre_hook(
        lambda _, arguments, options: device.run(causal, _tokens(arguments, options)), with_kwargs=True
    )

    def watch(_layer: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        states = arguments[0] if arguments else options["hidden_states"]
        if states.requires_grad:
            states.register_hook(lambda _: device.go_back())  # the gradients have gone through the last layer

    last = find_layers(causal)[-1].register_forward_pre_hook(watch, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
        last.remove()


def _tokens(arguments: tuple[Any, ...], options: dict[str, Any]) -> int:
    ids = options.get("input_ids")
    if ids is None:
        ids = arguments[0] if arguments else options["inputs_embeds"][..., 0]
    return int(ids.numel())
