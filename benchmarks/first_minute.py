"""The time from the command `treepack train` to its second step, part by part, and what choosing a plan costs of it.

    python benchmarks/first_minute.py PACKED [--model CONFIG.json] [--work DIR] [--steps N] [--cold] [options of train]

First a model of random weights in bfloat16 is saved. Then the command runs in fresh processes:

empty caches              of compiled code and kernels
caches                    of the first run
plan given, empty caches  the options that the first run chose: nothing is measured
plan given, caches        of the run before

With --cold only the two with empty caches run. The totals differ by what the choice costs beside compilation, which the
first step needs in any case. A run writes a line when it begins a part, and the script notes when each line arrives: a
part's time includes everything up to the next line. Runs plan for --steps, and are stopped after the second. Prints a
Markdown table of seconds, after the versions and the device.
"""

from __future__ import annotations

import argparse
import json
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
    "measuring memory": "measuring passes",
    "compiling": "compiling and measuring",
    "measuring the memory": "measuring pieces",
    "step 1 of": "first step",
    "training: step 1 ": "second step",
}
LAST = "training: step 2 "
_SWITCHES = ("offload_checkpoints", "offload_optimizer")


def save_weights(config: Path, folder: Path) -> None:
    """Save a model of random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()  # for the runs


def times(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Run the command until its second step; return the seconds of each part, and of all."""
    start = time.monotonic()
    marks: list[tuple[str, float]] = []
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    ) as run:
        assert run.stderr is not None
        for line in run.stderr:
            print(f"{time.monotonic() - start:6.1f}  {line}", end="", file=sys.stderr)
            text = line.partition("] ")[2] if line.startswith("[") else line
            # The longest of the beginnings: "measuring the memory of pieces"
            name = max((begin for begin in PARTS if text.startswith(begin)), key=len, default=None)
            if name is not None or text.startswith(LAST):
                marks.append(("" if name is None else PARTS[name], time.monotonic() - start))
            if text.startswith(LAST):
                run.kill()
    if not marks or marks[-1][0]:
        sys.exit(f"the command failed: {' '.join(command)}")
    # The first part begins with the process: marks [("a", 0.1), ("b", 2.0), ("", 5.0)] -> a 2.0, b 3.0, total 5.0
    ends = [mark for _, mark in marks[1:]]
    begins = [0.0, *ends[:-1]]
    parts = {name: end - begin for (name, _), begin, end in zip(marks, begins, ends, strict=False)}
    return {**parts, "total": marks[-1][1]}


def chosen(run: Path) -> list[str]:
    """Return the words of `train` for the plan that a run chose."""
    record = json.loads((run / "run.json").read_text())
    plan = record["chosen"]
    words = ["--compile" if plan["compile"] else "--no-compile", "--dtype", record["options"]["dtype"]]
    words += [f"--{'' if plan[name] else 'no-'}{name.replace('_', '-')}" for name in _SWITCHES]
    for name in ("checkpoint_layers", "carry", "pass_tokens", "loss_chunk"):
        words += [f"--{name.replace('_', '-')}", "off" if plan[name] is None else str(plan[name])]
    return words


def main() -> None:
    """Save the weights, run the command four times and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packed")
    parser.add_argument("--model", type=Path, default=Path("sample_data/tiny-qwen3.json"))
    parser.add_argument("--work", type=Path, default=Path("first_minute"))
    parser.add_argument("--steps", default="300")
    parser.add_argument("--cold", action="store_true", help="only the runs with empty caches")
    arguments, options = parser.parse_known_args()
    shutil.rmtree(arguments.work, ignore_errors=True)
    weights, out = arguments.work / "weights", arguments.work / "out"
    save_weights(arguments.model, weights)
    usual = ["--rows-per-step", "1", "--steps", arguments.steps, "--checkpoint-every", "0", *options]
    columns, plan = dict[str, dict[str, float]](), list[str]()
    runs = {"empty caches": "a", "caches": "a", "plan given, empty caches": "b", "plan given, caches": "b"}
    if arguments.cold:
        runs = {name: cache for name, cache in runs.items() if "empty" in name}
    for name, cache in runs.items():
        words = ["train", arguments.packed, "--model", str(weights), "--out", str(out), "--overwrite", *usual]
        folder = arguments.work.resolve() / cache
        environment = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        given = plan if cache == "b" else []
        columns[name] = times([sys.executable, "-c", COMMAND, *words, *given], {**os.environ, **environment})
        plan = plan or chosen(out)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}, torch {torch.__version__}, commit {commit()}: train {' '.join(usual)}; plan {' '.join(plan)}\n")
    print("| part | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
    for part in [*PARTS.values(), "total"]:
        print(f"| {part} | " + " | ".join(f"{column.get(part, 0.0):.1f}" for column in columns.values()) + " |")


if __name__ == "__main__":
    main()
