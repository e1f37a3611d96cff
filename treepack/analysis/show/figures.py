"""Figures and counts in the form that a person reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class ValueRange:
    """Minimum, mean and maximum of the values that are not NaN."""

    min: float
    mean: float
    max: float

    def __str__(self) -> str:
        """Return `1`, or `0 to 1, mean 0.5`."""
        if self.min == self.max:
            return four_digits(self.min)
        return f"{four_digits(self.min)} to {four_digits(self.max)}, mean {four_digits(self.mean)}"


def spread(values: Iterable[float]) -> ValueRange | None:
    """Return minimum, mean and maximum of the `values` that are not NaN; None if all are."""
    known = np.array([value for value in values if not np.isnan(value)])
    return ValueRange(float(known.min()), float(known.mean()), float(known.max())) if len(known) else None


def four_digits(value: float) -> str:
    """Return a figure with four significant digits."""
    return f"{value:.4g}"


def quantity_in_digits(count: int, noun: str) -> str:
    """Return `1 token`, `2,000 tokens`."""
    # trajectory -> trajectories, branch -> branches, token -> tokens
    plural = noun[:-1] + "ies" if noun.endswith("ry") else noun + ("es" if noun.endswith("ch") else "s")
    return f"{count:,} {noun if count == 1 else plural}"
