"""The time from the command `treepack train` to its second step, part by part.

    python benchmarks/first_minute.py PACKED [--model CONFIG.json] [--work DIR] [more options of train, after --]

Runs the same command three times in fresh processes: with empty caches of compiled code, with the caches of the first
run, and with the weights that the first run saved. The command writes a line when it begins a part; the script notes
when each line arrives. So a part's time includes everything up to the next line. Prints a Markdown table of seconds,
after the versions and the device.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from measure import commit

COMMAND = "import treepack_cli; treepack_cli.main()"
# Beginning of the line of each part, and its name in the table.
PARTS = {
    "importing torch": "importing torch and transformers",
    "opening": "opening the rows",
    "loading": "loading the weights",
    "probing": "probing the model",
    "attention": "optimiser, importing the compiler",
    "step": "first step",
    "training: step 1 ": "second step",
}
LAST = "training: step 2 "


def times(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Run the command; return the seconds of each part, and of all."""
    start = time.monotonic()
    marks: list[tuple[str, float]] = []
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    ) as run:
        assert run.stderr is not None
        for line in run.stderr:
            print(line, end="", file=sys.stderr)
            text = line.partition("] ")[2] if line.startswith("[") else line
            name = next((name for begin, name in PARTS.items() if text.startswith(begin)), None)
            if name is not None or text.startswith(LAST):
                marks.append((name or "", time.monotonic() - start))
    if run.returncode:
        sys.exit(f"the command failed: {' '.join(command)}")
    # The first part begins with the process: marks [("a", 0.1), ("b", 2.0), ("", 5.0)] -> a 2.0, b 3.0, total 5.0
    ends = [mark for _, mark in marks[1:]]
    begins = [0.0, *ends[:-1]]
    parts = {name: end - begin for (name, _), begin, end in zip(marks, begins, ends, strict=False)}
    return {**parts, "total": marks[-1][1]}


def main() -> None:
    """Run the command three times and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packed")
    parser.add_argument("--model", default="sample_data/tiny-qwen3.json")
    parser.add_argument("--work", type=Path, default=Path("first_minute"))
    parser.add_argument("options", nargs="*", help="options of train, after --")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.work, ignore_errors=True)
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(arguments.work.resolve() / "inductor"),
        "TRITON_CACHE_DIR": str(arguments.work.resolve() / "triton"),
    }
    weights = arguments.work / "weights"
    runs = {
        "first run": (arguments.model, weights),
        "second run": (arguments.model, arguments.work / "out"),
        "weights from disk": (str(weights), arguments.work / "out"),
    }
    options = ["--rows-per-step", "1", "--steps", "3", "--checkpoint-every", "0", "--overwrite", *arguments.options]
    columns = {}
    for name, (model, out) in runs.items():
        words = ["train", arguments.packed, "--model", model, "--out", str(out), *options]
        columns[name] = times([sys.executable, "-c", COMMAND, *words], environment)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}, torch {torch.__version__}, commit {commit()}: train {' '.join(options)}\n")
    print("| part | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
    for part in [*PARTS.values(), "total"]:
        print(f"| {part} | " + " | ".join(f"{column.get(part, 0.0):.1f}" for column in columns.values()) + " |")


if __name__ == "__main__":
    main()
