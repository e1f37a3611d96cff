"""The plan that a run chooses for itself, against other plans of the same rows, on one GPU or several.

    python benchmarks/fitting_runs.py make DATA                   packed directories; needs polars
    python benchmarks/fitting_runs.py run DATA [--model qwen3-1.7b,...] [--rows 8k,32k,256k,path] [--seconds N]
        [--lora-rank N] [--layers N] [--limit-gib N] [--budget SECONDS] [--json FILE] [--plan OPTIONS] [--only-given]
    torchrun --nproc-per-node N benchmarks/fitting_runs.py run DATA ...
    python benchmarks/fitting_runs.py run DATA --dry-run          a tiny model on the CPU, after make DATA --dry-run

For each model, its shape with random weights, and each kind of rows, the run is planned without options, as `treepack
train` plans it, and its first steps are timed. Then the same rows run with the plans of `CANDIDATES`, each as given by
hand, and before them with those of --plan, each in JSON: '{"compile": true, "checkpoint_layers": 14}'. The learning
rate is 0, so all losses must agree. Steps include the update; the first one, which compiles, is not timed. --seconds
ends the candidates of a model and rows early, --limit-gib makes the GPU smaller. Nothing starts after --budget seconds;
every record is written to --json at once. Over ranks the model is divided as a run divides it, each has as many rows as
one GPU alone, and candidates that do not fit by the measurements of the chosen plan are not run: a rank without memory
would leave the others waiting.

plan       chosen, or the options of a candidate
tokens/s   of the fastest timed step
peak       GPU memory beside weights, gradients and optimiser: predicted for the chosen plan, and measured
reserved   GPU memory that torch's allocator holds on the first rank after the last step
retries    how often the allocator of a rank had given back all that was free, by the end of each step
of best    tokens/s of the chosen plan / of the best plan that ran
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as `treepack train` sets it

import numpy as np
import torch
from compilations import made_on
from measure import alloc_retries, device_name

from treepack.costs.presets import PRESETS
from treepack.errors import TreepackError
from treepack.memory.device_memory import MemoryMeter, gpu_meter
from treepack.model.adapters.lora_options import LoraOptions
from treepack.model.loaded import LoadedModel
from treepack.train.optimiser import make_optimiser
from treepack.train.options import TrainOptions
from treepack.train.ranks import Ranks, find_device, join_ranks, leave_ranks
from treepack.train.retry import FittingRun
from treepack.train.run import TrainingRun
from treepack.train.setup.compute import ComputeSetting, choose_compute
from treepack.train.setup.memory_input import MemoryInput
from treepack.train.setup.rank_choice import choose_ranks
from treepack.train.setup.run_data import open_data
from treepack.train.setup.run_memory import MemoryChoices, choose_memory, coming_bytes
from treepack.train.setup.run_model import load_run_model

# Name of the rows: capacity, tokens of a rollout, rollouts of a group, groups, share of a rollout that repeats.
ROWS = {
    "2k": (2048, 700, 8, 192, (0.2, 0.9)),
    "8k": (8192, 2500, 8, 48, (0.2, 0.9)),
    "32k": (32768, 9000, 8, 24, (0.2, 0.9)),
    "256k": (262144, 60000, 16, 4, (0.3, 0.95)),
    "path": (207000, 200000, 1, 4, (0.0, 0.0)),
    "mixed": (207000, 110000, 1, 6, (0.0, 0.0)),  # after one row of "path"
}
ROWS_PER_STEP = {"2k": 32, "8k": 8, "32k": 2, "256k": 1, "path": 1, "mixed": 1, "tiny": 2}
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32}  # fmt: skip
VOCABULARY = 150_000
STEPS = 300  # of the planned run, so that compilation may pay
# Everything that a candidate does not name.
PLAIN: dict[str, Any] = {"offload_checkpoints": False, "pass_tokens": 32768, "loss_chunk": 2048, "carry": None}
CANDIDATES: dict[str, dict[str, Any]] = {
    "compiled, all layers": {"compile": True, "checkpoint_layers": "all"},
    "compiled, half": {"compile": True, "checkpoint_layers": "half"},
    "compiled, no layer": {"compile": True, "checkpoint_layers": 0},
    "compiled, no layer, pieces of 16k": {"compile": True, "checkpoint_layers": 0, "carry": 16384},
    "compiled, all layers, pieces of 64k": {"compile": True, "checkpoint_layers": "all", "carry": 65536},
    "compiled, no layer, pieces of 8k": {"compile": True, "checkpoint_layers": 0, "carry": 8192},
    "no layer": {"compile": False, "checkpoint_layers": 0},
    "all layers": {"compile": False, "checkpoint_layers": "all"},
    "compiled, all layers, whole weights": {"compile": True, "checkpoint_layers": "all", "whole_weights": True},
    "compiled, all offloaded": {"compile": True, "checkpoint_layers": "all", "offload_checkpoints": True},
    "compiled, all layers, moments offloaded": {"compile": True, "checkpoint_layers": "all", "offload_optimizer": True},
    "compiled, all offloaded, moments too": {
        **{"compile": True, "checkpoint_layers": "all", "offload_checkpoints": True, "offload_optimizer": True}
    },
}


def make(data: Path) -> None:
    """Write rollouts of random tokens, and pack them."""
    for name, (capacity, length, rollouts, groups, shared) in ROWS.items():
        rng = np.random.default_rng(0)
        with tempfile.TemporaryDirectory() as folder:
            with Path(folder, "rollouts.jsonl").open("w", encoding="utf-8") as file:
                records = _rollouts(rng, length, rollouts, groups, shared)
                longest = _rollouts(rng, ROWS["path"][1], 1, 1, shared) if name == "mixed" else iter(())
                for number, record in enumerate(chain(longest, records)):
                    file.write(json.dumps({**record, "id": str(number)}) + "\n")
            for command in (
                ["build-trie", f"{folder}/rollouts.jsonl", "--out", f"{folder}/trie"],
                ["pack", f"{folder}/trie", "--capacity", str(capacity), "--out", str(data / name)],
            ):
                subprocess.run([sys.executable, "-m", "treepack", *command], check=True)


def _rollouts(
    rng: np.random.Generator, length: int, rollouts: int, groups: int, shared: tuple[float, float]
) -> Iterator[dict[str, Any]]:
    for group in range(groups):
        family: list[list[int]] = []
        for number in range(rollouts):
            old = family[int(rng.integers(len(family)))] if family else []
            ids = old[: int(len(old) * rng.uniform(*shared))]
            ids = ids + rng.integers(0, VOCABULARY, max(1, length + int(rng.integers(-500, 500)) - len(ids))).tolist()
            family.append(ids)
            mask = [int(i >= len(ids) // 4) for i in range(len(ids))]
            yield {"id": f"{group}-{number}", "group_id": str(group), "input_ids": ids, "loss_mask": mask}


class Bench:
    """One model, and plans of rows that it runs."""

    def __init__(self, name: str, args: argparse.Namespace, ranks: Ranks) -> None:
        self.name, self.args, self.ranks = name, args, ranks
        self.forecast: Callable[[Any, int | None], int | None] | None = None  # by the chosen plan
        lora = LoraOptions(rank=args.lora_rank) if args.lora_rank else None
        self.options = TrainOptions(steps=STEPS, lr=0.0, lora=lora)
        self.compute: ComputeSetting = choose_compute(self.options)
        config = dict(PRESETS[name]) | (TINY if args.dry_run else {})
        if args.layers:
            config["num_hidden_layers"] = args.layers
        self.meter = self._meter()
        with tempfile.TemporaryDirectory() as folder, made_on(self.compute.device):
            path = Path(folder) / "config.json"
            path.write_text(json.dumps({**config, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}))
            self._divide(path)
            self.loaded: LoadedModel = load_run_model(path, self.options, self.compute, self.ranks)

    def _divide(self, model: Path) -> None:
        """Choose the ranks of a row and of experts and the place of weights, by the longest rows, as a run does."""
        longest = max(self.args.rows.split(","), key=lambda rows: ROWS[rows][0])
        options = replace(self.options, dtype=self.compute.dtype, rows_per_step=self._rows_per_step(longest))
        data = open_data(Path(self.args.data) / longest, options, self.ranks)
        self.options, lines = choose_ranks(model, options, data, self.ranks, self.meter)
        self.ranks = self.ranks.sharing(self.options.ranks_of_row)
        say(self.ranks, "\n".join((f"{self.name}: {self.ranks.size} ranks", *lines)))

    def _rows_per_step(self, rows: str) -> int:
        return ROWS_PER_STEP[rows] * self.ranks.size

    def _meter(self) -> MemoryMeter | None:
        if self.args.dry_run:
            return None
        meter = gpu_meter(self.compute.device)
        if not self.args.limit_gib:
            return meter
        limit = int(self.args.limit_gib * 2**30)
        torch.cuda.set_per_process_memory_fraction(limit / meter.total)
        return replace(meter, total=limit, free=lambda: limit - torch.cuda.memory_allocated())

    def run(self, rows: str, name: str, changes: dict[str, Any]) -> dict[str, Any]:
        """Plan and time a run of rows; return a record."""
        count = len(self.loaded.causal.model.layers)
        changes = {k: count // 2 if v == "half" else v for k, v in changes.items()}
        options = replace(self.options, rows_per_step=self._rows_per_step(rows), **changes)
        record: dict[str, Any] = {"model": self.name, "rows": rows, "plan": name}
        torch._dynamo.reset()
        start, notes = time.perf_counter(), list[str]()
        fitting = None
        try:
            data = open_data(Path(self.args.data) / rows, options, self.ranks)
            memory = choose_memory(MemoryInput(data, None, self.loaded, options, self.compute, self.ranks, self.meter))
            record |= {"planning": time.perf_counter() - start, "lines": memory.lines}
            record |= {"options": memory.plan.options, "predicted": memory.plan.num_bytes}
            # of all ranks, as the measured one; a candidate that is measured by nothing has no seconds
            record["predicted_rate"] = self.ranks.row_share[1] / memory.plan.seconds if memory.plan.seconds else 0
            self._check(name, memory)
            run = TrainingRun(
                loaded=self.loaded,
                options=replace(options, **memory.plan.options),
                ranks=self.ranks,
                carry_memory=memory.carry_memory,
                dataset=data.dataset,
                schedule=data.schedule,
                table=data.table,
                division=data.division,
            )
            fitting = FittingRun(run, make_optimiser(run), note=notes.append, record=lambda _: None)
            record |= self._steps(fitting, taken=self.args.take_gib if "taken" in name else 0)
            if name in CANDIDATES and notes:
                record["failed"] = notes[0][:80]
            record["notes"] = notes
        except (TreepackError, RuntimeError) as error:
            record["failed"] = str(error)[:300]
        if fitting is not None:
            fitting.close()
        del fitting
        self.loaded.model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        return record

    def _check(self, name: str, memory: MemoryChoices) -> None:
        """Refuse a candidate of several ranks that does not fit by the measurements of the chosen plan."""
        if name not in CANDIDATES:
            self.forecast = None if memory.memory is None else memory.memory.forecast
        elif self.ranks.grouped and self.forecast is not None and self.meter is not None:
            needed, room = self.forecast(memory.plan, None) or 0, self.meter.free()
            options = replace(self.options, **memory.plan.options)
            if needed > self.ranks.smallest(room - coming_bytes(self.loaded, options)):
                raise TreepackError(f"needs {needed / 2**30:.1f} GiB by the measurements of the chosen plan")

    def _steps(self, fitting: FittingRun, *, taken: float) -> dict[str, Any]:
        losses, rates, retries, first, other = [], [], list[int](), 0.0, None
        meter, before = self.meter, 0
        self.loaded.model.train()  # as in a run: compiled layers are made for one mode
        for number in range(self.args.steps):
            if number == self.args.steps - 1 and meter is not None:
                # After a step gradients exist; the next one frees them and allocates them again.
                before = meter.allocated()
                meter.reset()
            if number == self.args.steps - 1 and taken:
                other = torch.empty(int(taken * 2**30), dtype=torch.uint8, device=self.loaded.device)
            metrics = fitting.step(number)
            losses.append((metrics.loss, metrics.grad_norm))
            if number:
                rates.append(metrics.tokens / metrics.seconds)
            else:
                first = metrics.seconds
            retries.append(-self.ranks.smallest(0 if meter is None else -alloc_retries()))
        peak = 0 if meter is None else meter.peak() - before
        del other
        record = {"rate": max(rates), "rates": rates, "losses": losses, "peak": peak, "first_step": first}
        return record | {"retries": retries, "reserved": 0 if meter is None else torch.cuda.memory_reserved()}


def measure(args: argparse.Namespace, ranks: Ranks) -> list[dict[str, Any]]:
    """Run all plans of all models and rows."""
    records, end = list[dict[str, Any]](), time.perf_counter() + args.budget
    for name in args.model.split(","):
        start = time.perf_counter()
        if ranks.any(start > end):
            break
        bench = Bench(name, args, ranks)
        say(ranks, f"{name}: loaded in {time.perf_counter() - start:.0f} s")
        for rows in args.rows.split(","):
            start = time.perf_counter()
            plans: dict[str, dict[str, Any]] = {"chosen": {}}
            plans |= {"chosen again": {}} if args.again else {}
            plans |= {"chosen, memory taken": {}} if args.take_gib else {}
            plans |= {plan: PLAIN | changes for plan, changes in CANDIDATES.items()}
            for plan, changes in plans.items():
                if ranks.any(time.perf_counter() > end):
                    say(ranks, f"{name} {rows} {plan}: not started, because --budget is over")
                    break
                if plan in CANDIDATES and ranks.any(time.perf_counter() - start > args.seconds):
                    break
                if changes.get("whole_weights") and ranks.size == 1:
                    continue
                if plan in args.without.split(";") or (changes.get("carry") or 0) >= ROWS[rows][0]:
                    continue
                began = time.perf_counter()
                records.append(bench.run(rows, plan, changes))
                if ranks.leads:
                    show(records[-1], time.perf_counter() - began)
                if args.json and ranks.leads:
                    Path(args.json).write_text(json.dumps(records))
        del bench
        gc.collect()
        torch.cuda.empty_cache()
    return records


def say(ranks: Ranks, text: str) -> None:
    """Print a line on the first rank."""
    if ranks.leads:
        print(text, flush=True)


def show(record: dict[str, Any], seconds: float) -> None:
    """Print one record."""
    if record["plan"].startswith("chosen"):
        print(*record.get("lines", ()), sep="\n")
    text = f"{record['model']} {record['rows']} {record['plan']}: {seconds:.0f} s"
    if "planning" in record:
        text += f", planned in {record['planning']:.1f} s {record['options']}"
    if "rate" in record:
        text += f", {[round(rate) for rate in record['rates']]} tokens/s (predicted {record['predicted_rate']:,.0f})"
        text += f", peak {record['peak'] / 2**30:.1f} GiB (predicted {record['predicted'] / 2**30:.1f})"
        text += f", {record['reserved'] / 2**30:.1f} GiB reserved, allocator's retries {record['retries']}"
        text += f", first step {record['first_step']:.1f} s, loss {record['losses'][0]}"
    print(text, record.get("failed", ""), record.get("notes", ""), flush=True)


def table(records: list[dict[str, Any]]) -> None:
    """Print the table."""
    print("| model | rows | plan | tokens/s | predicted | peak GiB | predicted | of best |")
    print("|---" * 8 + "|")
    for each in records:
        same = [r for r in records if (r["model"], r["rows"]) == (each["model"], each["rows"])]
        best = max((r["rate"] for r in same if "rate" in r and "failed" not in r), default=0.0)
        if "rate" not in each or "failed" in each:
            print(f"| {each['model']} | {each['rows']} | {each['plan']} | - | - | - | - | {each.get('failed')} |")
            continue
        print(
            f"| {each['model']} | {each['rows']} | {each['plan']} "
            f"| {each['rate']:,.0f} | {each['predicted_rate']:,.0f} "
            f"| {each['peak'] / 2**30:.1f} | {each['predicted'] / 2**30:.1f} | {each['rate'] / best:.3f} |"
        )


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "run"))
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", default="qwen3-1.7b", help=", ".join(PRESETS))
    parser.add_argument("--rows", default="8k,32k,256k,path")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--without", default="", help="candidates to leave out, separated by ;")
    parser.add_argument("--plan", action="append", type=json.loads, default=[], help="options of another candidate")
    parser.add_argument("--only-given", action="store_true", help="only the chosen plan and those of --plan")
    parser.add_argument("--again", action="store_true", help="plan and run the chosen plan a second time")
    parser.add_argument("--take-gib", type=float, default=0, help="taken by another tensor before the last step")
    parser.add_argument("--lora-rank", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--limit-gib", type=float)
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no plan starts")
    parser.add_argument("--json")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    if args.dry_run:
        # Short rows, and a vocabulary for which a CPU has time.
        ROWS.clear()
        ROWS["tiny"] = (1024, 100, 8, 4, (0.2, 0.9))
        args.rows = "tiny"
    others = {} if args.only_given else dict(CANDIDATES)
    CANDIDATES.clear()
    CANDIDATES.update({", ".join(f"{k} {v}" for k, v in plan.items()): plan for plan in args.plan} | others)
    if args.what == "make":
        make(args.data)
        return
    ranks = join_ranks(find_device("cpu" if args.dry_run else "auto"))
    try:
        say(ranks, f"{ranks.size} times {device_name(dry=args.dry_run)}, torch {torch.__version__}")
        records = measure(args, ranks)
        if ranks.leads:
            table(records)
    finally:
        leave_ranks()


if __name__ == "__main__":
    main()
