"""The tables of docs/benchmarks.md from what `attention.py --json` wrote.

    python benchmarks/attention_table.py RUN.json ... > table.md

Prints for every run a sentence (hardware, versions) and a Markdown table. The table has one row per shape and workload
and one column per implementation, with milliseconds of forward and backward together and, in brackets, TFLOP/s on the
tree's own score pairs. Further columns give, for `triton`, the fraction of the measured matrix product rate and the
speedup over each other implementation of the tree, with geometric means in the last row. An implementation that did not
run has a dash, and its error follows below the table.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from statistics import geometric_mean
from typing import Any

SUBJECT = "triton"
TREE = ("flex", "flex-autotune", "flash")
LABELS = {"flat-fa2": "flat FA2", "flat-fa4": "flat FA4"}

Record = dict[str, Any]


def about(run: dict[str, Any]) -> str:
    """Return hardware and versions of a run, in lines of at most 120 characters."""
    order = {"bhtd": "heads before tokens", "bthd": "tokens before heads"}[run["layout"]]
    return textwrap.fill(
        f"{run['device']}, torch {run['torch']}: {run['dtype']}, {order} in memory; matrix product "
        f"{run['matmul_tflops']:.0f} TFLOP/s.",
        width=120,
    )


def cells_of(records: dict[str, Record], names: list[str], baselines: list[str], matmul: float) -> list[str]:
    """Return the row of one shape and workload, from its records by implementation."""
    first = next(iter(records.values()))
    cells = [f"{first['shape']} {first['heads']}", first["workload"], f"{first['tokens']:,} / {first['tokens_flat']:,}"]
    for name in names:
        record = records.get(name, {})
        cells.append(f"{record['both_ms']:.1f} ({record['both_tflops']:.0f})" if "both_ms" in record else "-")
    subject = records.get(SUBJECT, {})
    cells.append(f"{subject['both_tflops'] / matmul:.2f}" if "both_tflops" in subject else "-")
    for name in baselines:
        cells.append(f"{subject[f'over_{name}']:.2f}" if f"over_{name}" in subject else "-")
    return cells


def table(run: dict[str, Any]) -> list[str]:
    """Return the lines of one run."""
    workloads: dict[tuple[str, str], dict[str, Record]] = {}
    for record in run["rows"]:
        workloads.setdefault((record["shape"], record["workload"]), {})[record["implementation"]] = record
    names = list(dict.fromkeys(record["implementation"] for record in run["rows"]))
    baselines = [name for name in TREE if name in names]
    header = ["shape", "workload", "tokens tree / flat", *(LABELS.get(name, name) for name in names)]
    header += [f"{SUBJECT} of matmul", *(f"over {name}" for name in baselines)]
    lines = [about(run), "", f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for records in workloads.values():
        lines.append(f"| {' | '.join(cells_of(records, names, baselines, run['matmul_tflops']))} |")
    means = []
    for name in baselines:
        subjects = [records.get(SUBJECT, {}) for records in workloads.values()]
        ratios = [subject[f"over_{name}"] for subject in subjects if f"over_{name}" in subject]
        means.append(f"{geometric_mean(ratios):.2f}" if ratios else "-")
    lines.append(f"| {' | '.join(['geometric mean', *[''] * (len(names) + 3), *means])} |")
    failed = [
        f"- {r['implementation']} on {r['shape']}, {r['workload']}: {r['error']}" for r in run["rows"] if "error" in r
    ]
    return lines + (["", *failed] if failed else [])


def main() -> None:
    """Print the tables of all runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.json")
    print("\n\n".join("\n".join(table(json.loads(path.read_text()))) for path in parser.parse_args().runs))


if __name__ == "__main__":
    main()
