"""The random choice of tokens: uniform numbers of a request, and the tokens at these quantiles.

    seed 5, number 0 --uniform_numbers--> [0.65, ...] --quantile_tokens--> the token at 0.65 of the probabilities, ...

A request brings its own numbers, so its tokens do not depend on the other requests of a batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from treepack.trajectory import Float64

UInt64 = np.ndarray[Any, np.dtype[np.uint64]]


def quantile_tokens(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Return the token at the quantile `uniform` of each row, int64 [R]; all shapes are static.

        probabilities [0.2, 0.5, 0.3] -> sums [0.2, 0.7, 1.0], number 0.65: one sum is not above it -> token 1

    Args:
        logprobs: float32 [R, V].
        uniform: float64 [R], in [0, 1).
    """
    # float64, because in float32 the sums near 1 are multiples of 6e-8, more than many tokens' probabilities.
    sums = logprobs.double().exp().cumsum(-1)
    # The sums end at 1 up to rounding.
    return (sums <= uniform[:, None] * sums[:, -1:]).sum(-1).clamp_(max=logprobs.shape[1] - 1)


def uniform_numbers(seeds: UInt64, numbers: UInt64, width: int) -> Float64:
    """Return `width` numbers in [0, 1) for each pair of a seed and a number, float64 [R, width].

    They are the outputs of SplitMix64 (Steele, Lea and Flood, 2014) from a state that both determine.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    states = _mixed(_mixed(seeds + golden) + golden * (numbers + np.uint64(1)))
    steps = golden * np.arange(1, width + 1, dtype=np.uint64)
    # The upper 53 of 64 bits, because float64 has 53.
    return (_mixed(states[:, None] + steps) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(x: UInt64) -> UInt64:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
