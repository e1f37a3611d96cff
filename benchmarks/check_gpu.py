"""Check tree attention and recurrent layers on this GPU: all implementations against float64, and packed gradients.

    python benchmarks/check_gpu.py [--quick] [--only NAME,...] [--workers N] [--budget SECONDS]
    TRITON_INTERPRET=1 python benchmarks/check_gpu.py --dry-run      tiny rows on the CPU; the interpreter cuts off
        bfloat16 instead of rounding it, so the kernels fail the bounds of that dtype

Needs only torch with CUDA, triton and transformers, not the other requirements of treepack (polars, pyarrow, ...). The
checks of `attention_checks` (which defines their bounds), of `option_checks`, of `rectangle_checks`, of
`recurrent_checks`, of `offload_checks`, of `carried_checks` and of four tiny models run at the
same time, each in its own process, because most of the time is spent on compiling. Prints a table of them: the largest
error of output, dq, dk, dv and the sinks' gradient (of recurrent layers, of the decays and beta) over all cases, and
the largest ratio of an error to its bound with its case; per model, the largest relative error of a parameter's
gradient, packed against one by one. Exits 1 if an error exceeds its bound, if anything raised, or if a check was not
run within --budget.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from attention_checks import CHECKS, LAST, Result, check
from candidates import mend_interpreter
from carried_checks import CARRIED_CHECKS
from offload_checks import OFFLOAD_CHECKS
from option_checks import OPTION_CHECKS
from rectangle_checks import RECTANGLE_CHECKS
from recurrent_checks import RECURRENT_CHECKS

from treepack.attention.flex import BLOCK
from treepack.data.batch import Batch, make_batch
from treepack.model.head.head_chunks import ChunkTargets
from treepack.model.head.logit_map import LogitMap, TargetSlopes
from treepack.model.head.token_statistics import torch_gradients, torch_statistics
from treepack.model.load import load_model
from treepack.model.verify.gradients import verify_gradients

STATISTICS = "token statistics"
HOST_CHECKS = {**OFFLOAD_CHECKS, **CARRIED_CHECKS}
QUICK = (
    "6/2/64 bfloat16",
    "6/2/64 float32",
    "4/4/128 bfloat16",
    "options 6/2/64/64 float32",
    "rectangles 6/2/64/64 float32",
)
COMMON: dict[str, Any] = {"vocab_size": 320, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {**SMALL, "num_key_value_heads": 2, "head_dim": 32},
    "llama": {**SMALL, "num_key_value_heads": 4},
    "gpt_neox": SMALL,
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
}


def random_forest(length: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return `parent` of a random depth-first forest: runs, branches at any offset, and a few new roots."""
    generator = np.random.default_rng(seed)
    parent, path = np.full(length, -1), list[int]()
    for i in range(length):
        draw = generator.random()
        if path and draw < 0.02:
            del path[generator.integers(0 if draw < 0.002 else 1, len(path) + 1) :]
        parent[i] = path[-1] if path else -1
        path.append(i)
    return parent


def subtree_ends(parent: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return one past the last token of each token's subtree."""
    # parent -1 0 1 0 3 -> end 5 3 3 5 5
    end = np.arange(1, len(parent) + 1)
    for i in range(len(parent) - 1, 0, -1):
        if parent[i] >= 0:
            end[parent[i]] = max(end[parent[i]], end[i])
    return end


def packed_row(length: int, row_id: int, vocabulary: int) -> Batch:
    """Return a random packed row: every leaf ends one trajectory, and every token except the roots is trained."""
    parent = random_forest(length, 1000 + row_id)
    generator = np.random.default_rng(row_id)
    leaves = np.setdiff1d(np.arange(length), parent)
    scale, position = np.zeros(length, np.int64), np.zeros(length, np.int64)
    # parent -1 0 1 0 3 -> leaves 2 4 -> scale 2 1 1 1 1 (trajectories through each token), position 0 1 2 1 2
    scale[leaves] = 1
    for i in range(length - 1, -1, -1):
        if parent[i] >= 0:
            scale[parent[i]] += scale[i]
    for i in range(length):
        position[i] = position[parent[i]] + 1 if parent[i] >= 0 else 0
    row: Any = SimpleNamespace(
        row_id=row_id,
        step=None,
        input_ids=generator.integers(0, vocabulary, length),
        position_ids=position,
        parent=parent,
        subtree_end=subtree_ends(parent),
        scale=scale,
        loss_weight=np.where(parent >= 0, scale * 1.0, 0.0),
        trajectory_ids=[str(leaf) for leaf in leaves],
        trajectory_ends=leaves,
        trajectory_groups=[""] * len(leaves),
        terms=None,
        routes=None,
    )
    return make_batch(row, multiple=BLOCK if row_id % 2 else 1)


def check_model(name: str, device: torch.device) -> list[Result]:
    """Check a tiny model, named as `kind attention dtype`; the errors belong to the worst gradient and to the loss."""
    kind, attention, precision = name.split()
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{kind}.json"
            path.write_text(json.dumps({"model_type": kind, **MODELS[kind], **COMMON}))
            loaded = load_model(path, attention=attention, dtype=getattr(torch, precision), device=device)
        rows = [packed_row(length, i, COMMON["vocab_size"]).to(device) for i, length in enumerate((65, 300, 511))]
        report = verify_gradients(loaded, rows)
    except Exception as error:  # the other checks must still run; an error counts as a failure
        return [Result(name, "", "", (), (), f"raised {type(error).__name__}: {str(error)[:160]}")]
    worst, largest = report.worst
    return [Result(name, worst, attention, (largest, report.loss_error), (report.tolerance,) * 2)]


def check_statistics(device: torch.device, *, quick: bool) -> list[Result]:
    """Check log-probabilities, entropies and their gradients of a vocabulary against torch in float64."""
    from treepack.model.head.fused_statistics import fused_gradients, fused_statistics

    results = []
    generator = torch.Generator(device).manual_seed(0)
    # Relative to the largest value. A logit of 300 has a rounding error of 1.5e-5, and the probability the same
    # relative error; the gradient is also rounded to the dtype of the logits.
    unit = {torch.float32: 2.0**-15, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
    for words, spread in itertools.product((1000, 3000) if quick else (1000, 151_936), (1.0, 20.0)):
        for dtype, cap, tempered in itertools.product(unit, (None, 30.0), (False, True)):
            x = (torch.randn(32, words, generator=generator, device=device) * spread).to(dtype)
            labels = torch.randint(words, (64,), generator=generator, device=device)
            temperature = torch.linspace(0.3, 2, 64, device=device) if tempered else None
            # Each state predicts two targets.
            places, rows = torch.arange(0, 65, 2, device=device), torch.arange(64, device=device) // 2
            slopes = torch.linspace(-1, 2, 64, device=device)
            targets = ChunkTargets(places[:-1] // 2, rows.int(), places.int(), labels, temperature)
            case_map, outputs = LogitMap(1.0, cap), []
            logits = x.clone()
            found = fused_statistics(logits, targets, case_map)
            fused_gradients(logits, targets, case_map, found, TargetSlopes(slopes, slopes))
            outputs.append((found.logprobs, found.entropies, logits))
            logits = x.double()
            found = torch_statistics(logits, targets, case_map, with_entropies=True)
            torch_gradients(logits, targets, case_map, found, TargetSlopes(slopes.double(), slopes.double()))
            outputs.append((found.logprobs, found.entropies, logits))
            errors = tuple(
                float((ours.double() - exact).abs().max() / exact.abs().max())
                for ours, exact in zip(*outputs, strict=True)
            )
            case = f"{words} words, {str(dtype)[6:]}, spread {spread:g}, cap {cap}, {'several' if tempered else 'no'} T"
            results.append(Result(STATISTICS, case, "triton", errors, (1e-5, 1e-5, unit[dtype])))
    return results


def model_names(*, quick: bool) -> list[str]:
    """Return the name of every model check: each kind in each attention that models use."""
    ways = ("reference float64", "flex float32", "triton float32")
    return [f"{kind} {way}" for kind in list(MODELS)[: 1 if quick else None] for way in ways]


def run_one(name: str, kind: str, *, quick: bool) -> list[Result]:
    """Run one check in a worker process."""
    device = torch.device(kind)
    if kind == "cpu":
        mend_interpreter()
    if name == STATISTICS:
        return check_statistics(device, quick=quick)
    kernels = {
        **CHECKS,
        **OPTION_CHECKS,
        **RECTANGLE_CHECKS,
        **RECURRENT_CHECKS,
        **HOST_CHECKS,
        **LAST,
    }
    return check(name, kernels[name], device, quick=quick) if name in kernels else check_model(name, device)


def run_all(
    names: list[str], kind: str, *, quick: bool, workers: int, end: float
) -> Iterator[tuple[str, list[Result]]]:
    """Yield the results of each check when it ends; the checks of `LAST` run after all others, one by one.

    At the time `end`, checks that still run are stopped, and the others do not start.
    """
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    for chosen, count in (([n for n in names if n not in LAST], workers), ([n for n in names if n in LAST], 1)):
        # One process per check, so that its compiled code, caches or lost CUDA context cannot affect other checks.
        with ProcessPoolExecutor(count, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
            waiting: dict[Future[list[Result]], str] = {
                pool.submit(run_one, name, kind, quick=quick): name for name in chosen
            }
            try:
                for done in as_completed(waiting, timeout=max(0.0, end - time.time())):
                    yield waiting[done], done.result()
            except TimeoutError:
                processes = list((pool._processes or {}).values())
                pool.shutdown(wait=False, cancel_futures=True)
                for process in processes:
                    process.kill()
                return


def summary(name: str, results: list[Result]) -> list[str]:
    """Return one line per implementation: the largest of each error, and the case nearest to its bound."""
    lines = []
    for implementation in dict.fromkeys(result.implementation for result in results):
        mine = [result for result in results if result.implementation == implementation]
        measured = [result.errors for result in mine if result.errors]
        worst = [max(column) for column in itertools.zip_longest(*measured, fillvalue=0.0)]
        # Failures first, then the largest ratio; NaN compares as neither larger nor smaller, so it becomes 1e9.
        nearest = max(mine, key=lambda result: (not result.passed, result.use if result.use == result.use else 1e9))
        cells = " ".join(f"{value:9.1e}" for value in worst) + " " * 10 * (5 - len(worst))
        failed = [result for result in mine if not result.passed]
        mark = f"  FAIL in {len(failed)} of {len(mine)}" if failed else ""
        where = f"{nearest.case} {nearest.note}".strip()
        lines.append(f"{name:>27} {implementation:>9} {cells} {nearest.use:6.2f} {where}{mark}")
    return lines


def main() -> None:
    """Run every check and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer lengths, layouts and models")
    parser.add_argument("--only", default="", help="checks whose names contain one of these, separated by commas")
    parser.add_argument("--workers", type=int, default=10, help="checks at a time, of up to 6 GB each")
    parser.add_argument("--budget", type=float, default=threading.TIMEOUT_MAX, help="seconds before checks are stopped")
    parser.add_argument("--dry-run", action="store_true", help="tiny rows on the CPU")
    options = parser.parse_args()
    quick, began = options.quick or options.dry_run, time.time()
    names = [STATISTICS, *CHECKS, *OPTION_CHECKS, *RECTANGLE_CHECKS, *RECURRENT_CHECKS, *HOST_CHECKS]
    names += [*model_names(quick=quick), *LAST]
    if quick:
        names = [name for name in names if "/" not in name or name in QUICK]
    wanted = options.only.split(",")
    names = [name for name in names if any(part in name for part in wanted)]
    print("CPU" if options.dry_run else torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    results_of: dict[str, list[Result]] = {}
    kind, end = "cpu" if options.dry_run else "cuda", began + options.budget
    for name, results in run_all(names, kind, quick=quick, workers=options.workers, end=end):
        results_of[name] = results
        bad = [result for result in results if not result.passed]
        print(f"{time.time() - began:5.0f} s  {name}: {len(results)} results, {len(bad)} failures", flush=True)
        for result in bad[:8]:
            errors = " ".join(f"{a:.1e}/{b:.1e}" for a, b in zip(result.errors, result.bounds, strict=True))
            print(f"         {result.implementation} {result.case} {result.note} {errors}", flush=True)
    columns = "".join(f"{title:>10}" for title in ("", "output", "dq", "dk", "dv", "dsinks"))
    print(f"\n{'check':>27}{columns} {'share':>6} of the bound, in")
    for name in names:
        print("\n".join(summary(name, results_of[name])) if name in results_of else f"{name:>27}   not run in time")
    missing = len(results_of) < max(1, len(names))
    failed = missing or any(not result.passed for results in results_of.values() for result in results)
    print(f"\n{'FAILED' if failed else 'passed'} in {time.time() - began:.0f} s")
    sys.exit(failed)


if __name__ == "__main__":
    main()
