"""The tables and plots of the credit alignment, from the products that credit.py wrote.

    credit-TASK.jsonl: halves [2, 2]; for each estimator gram [T, T], dots [2, T]  --report-->  credit-TASK.md, .svg

The gradient from k trees of each prompt is the mean of k vectors v_t, so its cosine with the reference h follows from
the products alone: for the block of trees S, sum_S dots / (sqrt(sum_SS gram) |h|). T / k blocks without a common tree
give the mean and its bootstrap interval.

    cosine in the limit   of the expected gradients E v and E h: what more trees approach. Estimated from the products
                          of different trees and of different halves, which have no bias from noise
    scale                 E v . E h / |E h|^2: 1 is the exact gradient, and a division by a deviation raises it
    relative variance     of one tree of each prompt: E |v - E v|^2 / |E v|^2
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from curves_statistics import DrawnLine, bootstrap_interval, can_draw, draw
from curves_tables import read_records

from treepack.errors import TreepackError
from treepack.trajectory import Float64

MIN_BLOCKS = 4
BASE = "grpo"


@dataclass(frozen=True, slots=True)
class Products:
    """Products of an estimator's vectors, float64: `gram` [T, T] and `dots` [2, T]; `tokens` decoded by a vector."""

    gram: Float64
    dots: Float64
    tokens: float


def write_report(folder: Path) -> list[str]:
    """Write the table of each task beside the records, and its plot if matplotlib is installed; return the tables.

    Raises:
        TreepackError: there is no record of an estimator.
    """
    texts = []
    for path in sorted(folder.glob("credit-*.jsonl")):
        reference, *records = read_records(path)
        if not records:
            continue
        halves = np.array(reference["halves"])
        estimators = {
            each["estimator"]: Products(
                np.array(each["gram"]),
                np.array(each["dots"]),
                float(np.mean(each["decoded"])) / len(reference["rates"]),
            )
            for each in records
        }
        sizes, rates = json.dumps(reference["sizes"]), np.array(reference["rates"])
        head = f"{len(rates)} prompts with pass rates {rates.min():.2f} to {rates.max():.2f}; sizes {sizes}.\n\n"
        text = head + report(halves, estimators)
        path.with_suffix(".md").write_text(text)
        if can_draw():
            across, up = "decoded tokens per prompt", f"cosine with the reference, {reference['task']}"
            draw(lines(halves, estimators), path.with_suffix(".svg"), across=across, up=up, log=True)
        texts.append(f"{reference['task']}\n\n{text}")
    if not texts:
        raise TreepackError(f"{folder}: contains no record of an estimator; run credit.py first")
    return texts


def halves_cosine(halves: Float64) -> float:
    """Return the cosine of the two halves of the reference."""
    return float(halves[0, 1] / np.sqrt(halves[0, 0] * halves[1, 1]))


def ceiling(halves: Float64) -> float:
    """Return the expected cosine of the exact gradient with the whole reference, NaN if the halves point apart.

    With c the cosine of the halves, their mean has sqrt(2 c / (1 + c)) (Spearman 1910, Brown 1910).
    """
    cosine = halves_cosine(halves)
    return float(np.sqrt(2 * cosine / (1 + cosine))) if cosine > 0 else float("nan")


def block_cosines(halves: Float64, products: Products, size: int) -> Float64:
    """Return the cosine with the reference for each block of `size` trees, float64 [T // size]; 0 for a zero vector."""
    num = len(products.gram) // size
    used = num * size
    # The reference is the mean of the halves: |h|^2 is the mean of their four products.
    dots = products.dots.mean(axis=0)[:used].reshape(num, size).sum(axis=1)
    # gram [b, i, b, j] -> the sum over i and j of block b
    blocks = products.gram[:used, :used].reshape(num, size, num, size)
    squares = np.einsum("bibj->b", blocks)
    norms = np.sqrt(np.maximum(squares, 0.0) * halves.mean())
    cosines: Float64 = np.divide(dots, norms, out=np.zeros(num), where=norms > 0)
    return cosines


def block_sizes(num_trees: int) -> list[int]:
    """Return 1, 2, 4, ... up to the largest with `MIN_BLOCKS` blocks, at least [1]."""
    sizes = [1]
    while 2 * sizes[-1] * MIN_BLOCKS <= num_trees:
        sizes.append(2 * sizes[-1])
    return sizes


def limits(halves: Float64, products: Products) -> tuple[float, float, float]:
    """Return cosine in the limit, scale and relative variance; NaN if an estimate of a square is not positive."""
    num = len(products.gram)
    between = (products.gram.sum() - np.trace(products.gram)) / (num * (num - 1)) if num > 1 else float("nan")
    exact, dot = halves[0, 1], products.dots.mean()
    if not (between > 0 and exact > 0):
        return float("nan"), float("nan"), float("nan")
    variance = np.trace(products.gram) / num - between
    return float(dot / np.sqrt(between * exact)), float(dot / exact), float(variance / between)


def report(halves: Float64, estimators: dict[str, Products]) -> str:
    """Return the Markdown table of one task."""
    sizes = block_sizes(min(len(each.gram) for each in estimators.values()))
    base = BASE if BASE in estimators else next(iter(estimators))
    text = (
        f"Cosine of the halves of the reference: {halves_cosine(halves):.3f}; the exact gradient would have "
        f"{ceiling(halves):.3f} with the whole reference. Intervals of 95 % by bootstrap over blocks of trees.\n\n"
        f"| estimator | tokens / tree | {' | '.join(f'cosine, trees: {size}' for size in sizes)} "
        f"| against {base}, trees: {sizes[-1]} | cosine in the limit | scale | relative variance |\n"
        + "|---" * (6 + len(sizes))
        + "|\n"
    )
    of_base = block_cosines(halves, estimators[base], sizes[-1])
    for name, each in estimators.items():
        cosines = [block_cosines(halves, each, size) for size in sizes]
        # Estimators on trees have the same trees, so their blocks are pairs.
        against = "" if name == base else _with_interval(cosines[-1] - of_base[: len(cosines[-1])], sign="+")
        cells = [name, f"{each.tokens:.0f}", *map(_with_interval, cosines), against]
        cells += [f"{value:.3g}" for value in limits(halves, each)]
        text += f"| {' | '.join(cells)} |\n"
    return text


def lines(halves: Float64, estimators: dict[str, Products]) -> dict[str, DrawnLine]:
    """Return the cosine over decoded tokens per prompt for each estimator, and the ceiling."""
    made = {}
    for name, each in estimators.items():
        sizes = block_sizes(len(each.gram))
        cosines = np.array([block_cosines(halves, each, size).mean() for size in sizes])
        made[name] = DrawnLine(each.tokens * np.array(sizes, np.float64), cosines, dashed="leaf weights" in name)
    every = np.concatenate([line.x for line in made.values()])
    ends = np.array([every.min(), every.max()])
    return made | {"ceiling": DrawnLine(ends, np.full(2, ceiling(halves)), dashed=True)}


def _with_interval(values: Float64, sign: str = "") -> str:
    low, high = bootstrap_interval(lambda chosen: float(values[chosen].mean()), len(values))
    return f"{values.mean():{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"
