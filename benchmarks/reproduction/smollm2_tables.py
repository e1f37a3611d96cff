"""The tables of the SmolLM2 demonstration as Markdown, from the records that smollm2.py wrote.

    records of run_arm --arm_table--> a line for each arm    --curve_table--> the pass rate after each evaluation
                       --difference_line--> the paired difference of two arms

Intervals of 95 % are over the held-out problems: 1.96 standard errors of the mean of the problems' pass rates. They do
not contain the variance between training runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Records = Sequence[dict[str, Any]]
_PACKINGS = {
    "trees": "packed trees",
    "flat": "packed rollouts, nothing shared",
    "alone": "one rollout in each row",
}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of at least two values, and half the width of its interval of 95 %."""
    array = np.asarray(values, np.float64)
    return float(array.mean()), float(1.96 * array.std(ddof=1) / np.sqrt(len(array)))


def by_arm(records: Records) -> dict[str, list[dict[str, Any]]]:
    """Return the records of each arm, in the order of the file."""
    arms: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        arms.setdefault(record["arm"], []).append(record)
    return arms


def warm_up_table(rates: dict[int, float]) -> str:
    """Return the pass rate of each checkpoint of the warm-up; step 0 is the model as it came."""
    lines = [f"| {step} | {rate:.3f} |" for step, rate in sorted(rates.items())]
    return "\n".join(["| warm-up step | pass rate |", "|---|---|", *lines])


def arm_table(records: Records) -> str:
    """Return a line for each arm: its cost, its data, and its pass rate before and after."""
    lines = [
        "| arm | steps | decoded tokens | decoded / leaf | prefilled / leaf | mixed trees | POR | saved by packing "
        "| sampling s | training s | pass rate before | pass rate after |",
        "|" + "---|" * 12,
    ]
    for name, steps in by_arm(records).items():
        first, last, steps = steps[0], steps[-1], steps[1:]
        leaves, flat = _sum(steps, "leaves"), _sum(steps, "tokens_flat")
        cells = [
            name,
            f"{len(steps)}",
            f"{last['decoded']:,}",
            f"{_ratio(last['decoded'], leaves):.1f}",
            f"{_ratio(_sum(steps, 'prefilled'), leaves):.1f}",
            f"{_ratio(_sum(steps, 'mixed'), _sum(steps, 'trees')):.0%}",
            f"{1 - _ratio(_sum(steps, 'tokens_tree'), flat):.3f}",
            f"{1 - _ratio(_sum(steps, 'tokens_packed'), flat):.3f}",
            f"{_sum(steps, 'sample_seconds'):.1f}",
            f"{_sum(steps, 'train_seconds'):.1f}",
            _with_interval(first["passed"]),
            _with_interval(last["passed"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def curve_table(records: Records) -> str:
    """Return the pass rate after each evaluation of each arm."""
    lines = ["| arm | step | decoded tokens | seconds | pass rate |", "|---|---|---|---|---|"]
    for record in records:
        if "passed" in record:
            cells = [record["arm"], f"{record['step']}", f"{record['decoded']:,}", f"{record['seconds']:.1f}"]
            lines.append(f"| {' | '.join([*cells, _with_interval(record['passed'])])} |")
    return "\n".join(lines)


def difference_line(records: Records, one: str, other: str) -> str:
    """Return the difference of the last pass rates of two arms, paired by the held-out problems."""
    last = {name: np.array(steps[-1]["passed"]) for name, steps in by_arm(records).items()}
    mean, half = interval(last[one] - last[other])
    verdict = "the interval contains 0" if abs(mean) <= half else "the interval does not contain 0"
    return f"Pass rate of {one} minus {other} at the end: {100 * mean:+.1f} +- {100 * half:.1f} points; {verdict}."


def speed_table(records: Records) -> str:
    """Return a line for each packing of one step."""
    alone = next(record for record in records if record["packing"] == "alone")
    lines = [
        "| the same rollouts as | rows | tokens | seconds of a step | times alone | distance of the gradient |",
        "|---|---|---|---|---|---|",
    ]
    for record in reversed(records):
        cells = [
            _PACKINGS[record["packing"]],
            f"{record['rows']:,}",
            f"{record['tokens']:,}",
            f"{record['seconds']:.3f}",
            f"{record['seconds'] / alone['seconds']:.2f}",
            f"{record['distance']:.1e}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _sum(records: Records, name: str) -> float:
    # Steps without a mixed tree train nothing, and have no tokens.
    return float(sum(record.get(name, 0) for record in records))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def _with_interval(values: Sequence[float]) -> str:
    mean, half = interval(values)
    return f"{mean:.3f} +- {half:.3f}"
