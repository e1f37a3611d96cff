"""The program of each process of a test of several ranks: `train_over` trains every case, all ranks together.

Processes meet through a file, so no port is needed; they are started once for many cases.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing

from support.fresh_processes import PROCESSES
from support.simulated_device import ScriptedMemory, ScriptedShortage
from support.strategies import make
from treepack.objectives.objective import choose_objective
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.ranks import Ranks, join_ranks
from treepack.train.setup.opening import open_run
from treepack.trajectory import Trajectory

CPU = TrainOptions(device="cpu", lr=1e-2, rows_per_step=5, clip=0.5)


@dataclass(frozen=True)
class Case:
    """A training run in the directory `out`, by default one named after it; `changes` are to the options `CPU`.

    It is resumed if possible, and stops after the step `until`. `held_out` are rows to evaluate on. `differences` are
    changes on all ranks but the first.
    """

    name: str
    packed: str | Path
    model: Path
    changes: dict[str, Any]
    loss: str = "sft"
    out: str | Path | None = None
    until: int | None = None
    held_out: Path | None = None
    value_coef: float | None = None
    objective: dict[str, Any] = field(default_factory=dict)  # further options of the loss
    teacher: Path | None = None
    memory: ScriptedMemory | None = None  # to plan with, as on GPUs
    shortage: ScriptedShortage | None = None
    differences: dict[str, Any] = field(default_factory=dict)


def train_over(size: int, folder: Path, cases: list[Case]) -> dict[str, dict[str, Any]]:
    """Train each case over `size` ranks, 0 for this process without a group, into folder/size.

    Returns:
        of each name: `out`, `records` of the steps with the number of `graphs` compiled so far, full `gradients` of
        the last step, `notes`, and `remarks` during the run.
    """
    out = folder / str(size)
    out.mkdir(exist_ok=True)
    (out / "meeting").unlink(missing_ok=True)
    if size:
        multiprocessing.start_processes(  # type: ignore[attr-defined,no-untyped-call]
            _process, (size, out, cases, dict(os.environ)), nprocs=size, start_method=PROCESSES.get_start_method()
        )
    else:
        for case in cases:
            _train(Ranks(), case, out / case.name)
    return {case.name: torch.load(out / f"{case.name}.pt", weights_only=False) for case in cases}


@contextmanager
def counted_graphs() -> Iterator[list[int]]:
    """One entry for every graph that torch.compile traces; none is turned into machine code, which takes long."""
    traced: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        traced.append(len(graph.graph.nodes))
        return graph.forward

    original = torch.compile
    torch.compile = functools.partial(original, backend=backend)
    try:
        yield traced
    finally:
        torch.compile = original


def _process(rank: int, size: int, out: Path, cases: list[Case], environment: dict[str, str]) -> None:
    os.environ.update(environment)  # a forkserver has that of its own start
    torch.set_num_threads(1)
    store = distributed.FileStore(str(out / "meeting"), size)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    ranks = join_ranks(torch.device("cpu"))
    for case in cases:
        _train(ranks, case, out / case.name)
    distributed.destroy_process_group()


def _train(ranks: Ranks, case: Case, out: Path) -> None:
    teacher = None if case.teacher is None else str(case.teacher)
    objective = choose_objective(case.loss, value_coef=case.value_coef, teacher=teacher, **case.objective)
    if case.changes.get("compile"):
        torch.compiler.reset()  # forgets what earlier tests of this process compiled, which would not be traced again
    records: list[dict[str, Any]] = []
    with counted_graphs() as graphs:
        run = open_run(
            case.packed,
            case.model,
            replace(CPU, objective=objective, **case.changes, **(case.differences if ranks.rank else {})),
            ranks,
            held_out=case.held_out,
            meter=None if case.memory is None else case.memory.meter(ranks.rank, records),
        )
        if case.shortage is not None and case.shortage.rank == ranks.rank:
            case.shortage.attach(run.loaded.causal)
        remarks: list[str] = []
        steps = train(
            run, case.out or out, resume=True, stop=lambda: len(records) + 1 == case.until, note=remarks.append
        )
        for metrics in steps:
            records.append({**metrics.as_record(), "graphs": len(graphs)})
    gradients = {}
    for name, parameter in run.loaded.model.named_parameters():
        gradient: Any = parameter.grad
        gradients[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    if ranks.leads:
        outcome: dict[str, Any] = {"out": case.out or out, "records": records, "gradients": gradients}
        outcome |= {"notes": run.notes, "remarks": remarks}
        torch.save(outcome, out.with_suffix(".pt"))


# Times and rates, and the number of graphs that torch.compile has traced so far in the process.
NOT_COMPARED = set(
    "seconds wait_seconds slowest_pass tokens_per_second tokens_flat_per_second graphs eval_seconds "
    "router_aux_seconds".split()
)


def assert_same_steps(result: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that metrics and the gradients of the last step are equal except for float32 rounding."""
    assert len(result["records"]) == len(expected["records"]) > 0
    for actual, reference in zip(result["records"], expected["records"], strict=True):
        assert actual.keys() == reference.keys()
        for name in actual.keys() - NOT_COMPARED:
            assert actual[name] == pytest.approx(reference[name], rel=2e-5, abs=1e-6), name
    assert result["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        torch.testing.assert_close(result["gradients"][name], gradient, rtol=1e-4, atol=1e-6)


def four_trees(first: int = 0) -> list[Trajectory]:
    """Return four trees of different sizes, so that rows of 50 tokens have different numbers of pieces."""
    found = []
    for tree, (prompt, answers) in enumerate([(6, 1), (8, 3), (20, 2), (9, 5)]):
        start = [first + tree, *(10 + i % 5 for i in range(prompt - 1))]
        for answer in range(answers):
            tokens = [*start, 20 + answer, *(21 + (answer + i) % 4 for i in range(3 + 2 * answer))]
            spans = [(prompt, len(tokens), 1.0 + answer % 2)]
            name = f"t{tree}-{answer}"
            found.append(make(name, tokens, spans=spans, group=f"g{tree}", advantage=answer - 1.0, reward=1.0 * answer))
    return found
