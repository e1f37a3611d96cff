"""The program of four ranks that share rows: losses, gradients and scores against the same rank alone.

    run_over_ranks(folder, checks) -> {(check, 2 or 4): worst error}

The first rank computes each check alone, and then with one and with three other ranks, in float64.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing

from support.experts import random_routes
from support.fresh_processes import PROCESSES
from support.oracle_model import Sample, gradients, make_row, worst_error
from support.packed_objectives import opened, rollouts
from support.tiny_families import KeepFloat64, family_config, spread_weights
from treepack.carry.backward import CarryOptions, RowsInPieces
from treepack.data.batch import Batch, make_batch
from treepack.data.joined import join_rows
from treepack.model.collation import batch_logprobs, batch_loss_and_metrics, collate
from treepack.model.forward import RowRunner, WholeRows
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel
from treepack.model.verify.gradients import verify_gradients
from treepack.objectives.denominators import step_factors, trajectory_table
from treepack.objectives.objective import choose_objective
from treepack.objectives.row_numbers import LossPart, ScoreRequest
from treepack.online import OnlineOptions, batch_statistics, plan_batch
from treepack.sequence.share import share_rows

ONLINE = OnlineOptions(capacity=16)
TRUNK = tuple(range(1, 7))
PATHS = (
    (*TRUNK, 7, 8, 9, 10, 11, 12),
    (*TRUNK, 40, 41, 42, 43, 44),
    (*TRUNK, 40, 41, 7, 8),
    (*TRUNK, 7, 8, 9),  # ends inside another trajectory
    (20, 21, 22, 23, 24, 25, 26),  # a tree of its own
)
ROW = make_batch(make_row([Sample(path, (0.0, *[1.0] * (len(path) - 1))) for path in PATHS]), multiple=8)
SHORT = make_batch(make_row([Sample((1, 2, 3), (0.0, 1.0, 0.5)), Sample((1, 4), (0.0, 2.0))]))  # four tokens
LONE = make_batch(make_row([Sample((1, 2), (0.0, 1.0))]))  # fewer tokens than ranks


@dataclass(frozen=True)
class Check:
    """A comparison of one model.

    Attributes:
        name: of the check.
        config: a config file.
        batches: rows, with parts of a loss or sft.
        limit: tokens of a piece; None for whole rows.
        collated: True for the rows side by side in one batch, by the losses of `collation`.
        options: of `load_model`.
    """

    name: str
    config: Path
    batches: tuple[tuple[Batch, LossPart], ...] = ((ROW, LossPart()), (LONE, LossPart()))
    limit: int | None = None
    collated: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def with_routes(batches: Sequence[tuple[Batch, LossPart]]) -> tuple[tuple[Batch, LossPart], ...]:
    """Return rows whose tokens go to random recorded experts."""
    return tuple((replace(batch, routes=random_routes(batch)), part) for batch, part in batches)


def write_config(folder: Path, kind: str, **fields: Any) -> Path:
    """Write the configuration of a tiny model into `folder`; return its path."""
    path = folder / f"{kind}-{len(list(folder.glob('*.json')))}.json"
    path.write_text(json.dumps(family_config(kind, **fields).to_dict(), default=str))
    return path


def run_over_ranks(folder: Path, checks: list[Check]) -> dict[tuple[str, int], float]:
    """Run the checks on four ranks; return the worst relative error of each."""
    torch.save(checks, folder / "checks.pt")  # as arguments, each tensor would be an open file
    multiprocessing.start_processes(  # type: ignore[attr-defined,no-untyped-call]
        _process, (folder, dict(os.environ)), nprocs=4, start_method=PROCESSES.get_start_method()
    )
    found: dict[tuple[str, int], float] = torch.load(folder / "found.pt")
    return found


def _process(rank: int, folder: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)  # a forkserver has that of its own start
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "meeting"), 4)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=4)
    groups = {2: distributed.new_group([0, 1]), 4: distributed.group.WORLD}
    found: dict[tuple[str, int], float] = {}
    for check in torch.load(folder / "checks.pt", weights_only=False):
        loaded = _loaded(check)
        with KeepFloat64():
            expected = _outcome(loaded, check, None) if rank == 0 else None
            for size, group in groups.items():
                if rank >= size:
                    continue
                share_rows(loaded.causal, group)
                outcome = _outcome(loaded, check, group)
                share_rows(loaded.causal, None)
                if expected is not None:
                    found[check.name, size] = worst_error(outcome, expected)
    share_rows(loaded.causal, groups[4])
    found["verified", 4] = verify_gradients(loaded, [ROW]).worst[1]
    if rank == 0:
        torch.save(found, folder / "found.pt")
    distributed.destroy_process_group()


def _loaded(check: Check) -> LoadedModel:
    loaded = load_model(check.config, dtype=torch.float64, **check.options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        spread_weights(loaded.model)
    return loaded


def _outcome(loaded: LoadedModel, check: Check, group: Any) -> dict[str, Tensor]:
    """Return losses, sums and the gradient of each parameter, summed over the ranks of the group."""
    whole: RowRunner = WholeRows(loaded, chunk=3)
    loaded.model.zero_grad()
    outcome: dict[str, Tensor] = {}
    if check.batches[0][1].factors is not None:
        outcome = _collated(loaded, check) if check.collated else _scores(whole, check)
    for number, (batch, part) in enumerate(check.batches):
        pieces = check.limit is not None and batch.num_tokens > check.limit
        runner = RowsInPieces(loaded, CarryOptions(check.limit, chunk=3)) if pieces and check.limit else whole
        result = runner.backward(batch, part)
        outcome |= {f"{number} loss": result.loss, f"{number} rows": result.rows}
        outcome |= {f"{number} {name}": value.double() for name, value in result.sums.items()}
    for name, gradient in gradients(loaded.model).items():
        assert bool(gradient.isfinite().all())
        if group is not None:
            distributed.all_reduce(gradient, group=group)
        outcome[f"gradient of {name}"] = gradient
    return outcome


def _scores(whole: RowRunner, check: Check) -> dict[str, Tensor]:
    """Return the numbers about trained tokens of the first row, and the gradient of a sum of them through the model."""
    batch, part = check.batches[0]
    tokens = (batch.parent >= 0).nonzero().squeeze(-1)
    reads = ScoreRequest(values=part.objective.has_values)
    temperature = torch.linspace(0.5, 2, len(tokens), dtype=torch.float64)
    scores = whole.scores(batch, tokens.flip(0), reads, temperature=temperature)
    found = {name: each for name, each in scores._asdict().items() if each is not None}
    factors = torch.arange(1.0, len(tokens) + 1, dtype=torch.float64)
    torch.autograd.backward(torch.stack([(each * factors).sum() for each in found.values()]).sum())
    with torch.no_grad():
        if reads.values:
            found["after"] = whole.values(batch)
        more = whole.scores(batch, tokens, ScoreRequest(top_k=3, states=True), temperature=temperature)
        found |= {name: each.double() for name, each in more._asdict().items() if each is not None}
    return {name: each.detach() for name, each in found.items()}


def _collated(loaded: LoadedModel, check: Check) -> dict[str, Tensor]:
    """Return the losses of a batch of rows, and numbers about the tokens of its terms; their gradients are added."""
    inputs = collate([batch for batch, _ in check.batches])
    loss, metrics = batch_loss_and_metrics(loaded.model, inputs, chunk=3)
    torch.autograd.backward(loss)
    logprobs, entropies = batch_logprobs(loaded.model, inputs, temperature=0.7, chunk=3)
    factors = torch.arange(1.0, len(logprobs) + 1, dtype=torch.float64)
    torch.autograd.backward(((logprobs + 2 * entropies) * factors).sum())
    paths = [torch.tensor(path) for path in PATHS]
    routes = None
    if check.batches[0][0].routes is not None:  # of two layers; equal tokens have equal experts
        routes = [torch.stack([ids % 4, (ids + 1) % 4], -1)[:, None].expand(-1, 2, -1) for ids in paths]
    online = plan_batch(paths, options=ONLINE, temperature=0.5, routes=routes)
    statistics = [torch.cat(each) for each in batch_statistics(loaded.model, online, ONLINE)]
    torch.autograd.backward(torch.stack([(each.double() ** 2).sum() for each in statistics]).sum())
    scores = {f"online {number}": each.detach() for number, each in enumerate(statistics)}
    return scores | {
        "loss": loss.detach(),
        "metrics": metrics,
        "logprobs": logprobs.detach(),
        "entropies": entropies.detach(),
    }


def objective_checks(folder: Path, config: Path, mixture: Path, cases: list[dict[str, Any]]) -> list[Check]:
    """Return the checks of objectives over terms on two rows of random rollouts: joined, and each in pieces.

    The last two checks have both rows in one batch, of the model and of a mixture that replays recorded experts.
    """
    samples = [
        replace(each, returns=[0.1 * i for i in range(len(each.tokens))], old_values=[0.3] * len(each.tokens))
        for each in rollouts(count=8)
    ]
    dataset = opened(folder / "packed", samples, [0, 1] * 4)
    checks = []
    for case in cases:
        objective = choose_objective(**case)
        table = trajectory_table(dataset, objective)
        factors = [torch.from_numpy(each) for each in step_factors(table, [0, 1], objective)]
        rows = [dataset[0], dataset[1]]
        joined = (join_rows(rows, multiple=8), LossPart(objective, torch.cat(factors)))
        alone = tuple((row, LossPart(objective, own)) for row, own in zip(rows, factors, strict=True))
        options = {"value_head": True, "random_head": True} if objective.has_values else {}
        name = "-".join(map(str, case.values()))
        checks.append(Check(name, config, (joined,), options=options))
        checks.append(Check(f"{name} in pieces", config, alone, limit=6, options=options))
    collated = Check("collated", config, alone, collated=True, options=options)
    replayed_too = replace(collated, name="collated with routes", config=mixture, batches=with_routes(alone))
    return [*checks, collated, replayed_too]
