"""Sizes of recurrent layers of real models in the benchmarks of layers and of kernels."""

from __future__ import annotations

from typing import NamedTuple


class Layer(NamedTuple):
    """Sizes of a layer: heads of q and k, heads of v, dimensions of k and v, its rule, and taps of its convolution."""

    key_heads: int
    heads: int
    keys: int
    values: int
    is_delta: bool
    taps: int = 4

    @property
    def channels(self) -> list[int]:
        """Channels of q, k and v, which the convolution mixes along the path."""
        return [self.key_heads * self.keys] * 2 + [self.heads * self.values]


LAYERS = {
    "qwen3.5-4b": Layer(16, 32, 128, 128, is_delta=True),
    "nemotron-h-8b": Layer(8, 128, 128, 64, is_delta=False),
}
