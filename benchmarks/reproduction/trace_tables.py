"""Tables of TRACE and PROS as Markdown, from the records that curves.py wrote.

    python benchmarks/reproduction/trace_tables.py FOLDER      TRACE, table 1 -> FOLDER/trace-TASK.md
    python benchmarks/reproduction/pros_tables.py FOLDER       PROS          -> FOLDER/pros-TASK.md

Each figure is the mean over the steps of a run after the first, up to the smallest number of decoded tokens that all
runs have reached, and then over the seeds, with an interval of 95 % by Student's t. Steps without the figure, such as a
correlation of constants, are left out. The pass rate is that of the held-out prompts at this number of tokens. The
plots of the same runs are those of `curves.py --report`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from curves_statistics import t_interval
from curves_tables import read_records, read_runs

from treepack.errors import TreepackError
from treepack.trajectory import Float64

TRACE_ARMS = {  # stage 1 and stage 2 of table 1
    "trace-uniform": "uniform, uniform",
    "trace-roots": "active, uniform",
    "trace-prefixes": "uniform, active",
    "trace": "active, active",
}
TRACE_COLUMNS = {
    "root_ratio": "mixed / prompts rolled out",
    "rollout_ratio": "rollouts of mixed prompts",
    "prompts": "prompts rolled out",
    "mixed": "mixed prompts",
    "mixed_per_token": "mixed prompts / 1,000 decoded tokens",
    "prefix_ratio": "continued prefixes that flip",
    "spearman_root": "Spearman, prompts",
    "spearman_shared_prefix": "Spearman, shared prefixes",
    "step_decoded": "decoded tokens / step",
    "reused": "tokens of reused prefixes / step",
}
Records = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Run:
    """The steps of a run up to the common number of tokens, and its held-out pass rate there."""

    steps: Records
    pass_rate: float


def main(arguments: Sequence[str]) -> None:
    """Write and print the table of TRACE."""
    for text in write_tables(read_folder(arguments), "trace", TRACE_ARMS, TRACE_COLUMNS):
        print(text)


def read_folder(arguments: Sequence[str]) -> Path:
    """Return the only argument, the folder of the records."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="records of curves.py")
    folder: Path = parser.parse_args(arguments).folder
    return folder


def write_tables(folder: Path, name: str, arms: Mapping[str, str], columns: Mapping[str, str]) -> list[str]:
    """Write FOLDER/NAME-TASK.md for each task in which one of `arms` has run, and return the texts.

    Args:
        folder: the records of curves.py.
        name: the beginning of the name of the files.
        arms: label of each arm.
        columns: heading of each figure.

    Raises:
        TreepackError: none of the arms has been evaluated after its start.
    """
    texts = []
    for task in sorted(read_runs(folder)):
        runs, tokens = read_arms(folder, task, list(arms))
        if runs:
            texts.append(table(runs, tokens, arms, columns))
            (folder / f"{name}-{task}.md").write_text(texts[-1])
    if not texts:
        raise TreepackError(f"{folder}: contains no run of {', '.join(arms)}; run curves.py with these --arms first")
    return texts


def read_arms(folder: Path, task: str, arms: Sequence[str]) -> tuple[dict[str, dict[int, Run]], float]:
    """Return the runs of `arms` by arm and seed, and the number of decoded tokens that all of them have reached."""
    known = read_runs(folder).get(task, {})
    curves = {(arm, seed): curve for arm in arms for seed, curve in known.get(arm, {}).items()}
    if not curves:
        return {}, 0.0
    tokens = float(min(curve.decoded[-1] for curve in curves.values()))
    runs: dict[str, dict[int, Run]] = {}
    for (arm, seed), curve in curves.items():
        records = read_records(folder / f"{task}-{arm}-{seed}.jsonl")
        # The first step has no predictions yet, in any arm.
        steps = [each for each in records if each["step"] > 1 and each["decoded"] <= tokens]
        runs.setdefault(arm, {})[seed] = Run(steps, float(curve.at(np.array([tokens]))[0]))
    return runs, tokens


def figure(run: Run, name: str) -> float:
    """Return the mean of a figure over the steps of a run that have it, NaN without such a step."""
    if name == "mixed_per_token":
        decoded = sum(step["step_decoded"] for step in run.steps)
        return 1000 * sum(step["mixed"] for step in run.steps) / decoded if decoded else float("nan")
    values = [step[name] for step in run.steps if step.get(name) is not None]
    return float(np.mean(values)) if values else float("nan")


def table(
    runs: Mapping[str, Mapping[int, Run]], tokens: float, arms: Mapping[str, str], columns: Mapping[str, str]
) -> str:
    """Return the Markdown table of one task; differences are from the first arm that has run, paired by seed."""
    base = next(arm for arm in arms if arm in runs)
    head = ["arm", "seeds", "held-out pass rate", f"against {arms[base]}", *columns.values()]
    lines = [f"Up to {tokens:,.0f} decoded tokens.", "", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for arm, label in arms.items():
        if arm not in runs:
            continue
        seeds = sorted(runs[arm].keys() & runs[base].keys())
        differences = np.array([runs[arm][seed].pass_rate - runs[base][seed].pass_rate for seed in seeds])
        cells = [
            label,
            f"{len(runs[arm])}",
            shown(np.array([run.pass_rate for run in runs[arm].values()])),
            "" if arm == base or not seeds else shown(differences, sign="+"),
            *(shown(np.array([figure(run, name) for run in runs[arm].values()])) for name in columns),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def shown(values: Float64, *, sign: str = "") -> str:
    """Return mean and interval of the finite values, "-" without any."""
    values = values[np.isfinite(values)]
    if len(values) == 0:
        return "-"
    mean, half = t_interval(values)
    form = f"{sign},.0f" if abs(mean) >= 100 else f"{sign}.3f"
    return f"{mean:{form}}" + (f" ± {half:{form.lstrip('+')}}" if np.isfinite(half) else "")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except TreepackError as error:
        raise SystemExit(f"error: {error}") from error
