"""Credit alignment: how near the gradient of each estimator is to the exact policy gradient, per rollout token.

    python benchmarks/reproduction/credit.py --policy FOLDER --out FOLDER [--prompts 16] [--rollouts 1024] [--trees 32]
    python benchmarks/reproduction/credit.py --out FOLDER --report

    prompts --1,024 rollouts each, in two halves--> reference     the cosine of the halves bounds what can be seen
            --32 trees each--> a vector per estimator and tree    all estimators on the same trees
            --32 x as many independent rollouts--> the same       what the trees themselves cost or gain

The prompts are those of a pool whose pass rate in `--screen` rollouts is from 0.1 to 0.9, because others have nearly no
gradient. The policy is not trained. FOLDER/credit-TASK.jsonl gets the products of the vectors of each estimator, which
all figures of the report follow from, one line after the other, so a run that is cut keeps what it has. The same
command continues it: FOLDER/halves-TASK.pt has the vectors of the reference.

Expected minutes on one H200 for one task, for counts and not measured: the reference decodes 16 x 1,024 rollouts and
the trees 2 x 32 x 16 x 16, 33,000 rollouts or 1.3e6 tokens in total, 10 seconds at 300,000 tokens a second, and about a
minute of the samplers' Python. There are 22 x 32 = 704 gradients of 256 rollouts; packing and a backward pass of about
12,000 tokens are 0.1 to 0.2 seconds, so 1 to 3 minutes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from credit_gradients import ESTIMATORS, estimator_gradient, reference_halves, trie_of
from credit_tables import write_report
from curves_arms import tree_shape
from curves_tables import read_records
from learner import Learner, start_learner
from tasks import pass_rates, sample_trees
from torch import Tensor
from warm_up import load_task

from treepack.errors import TreepackError
from treepack.rollout.options import TreeOptions
from treepack.rollout.query import Query
from treepack.rollout.tree import Tree

LOW, HIGH = 0.1, 0.9  # pass rates of the prompts
PROMPT_SEED, TREE_SEED = 31, 1000
AT_ONCE = 4096  # rollouts of the reference that are sampled and packed together


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of a run; `width` are the leaves of a tree, and `pool` the prompts that are screened."""

    prompts: int = 16
    rollouts: int = 1024
    trees: int = 32
    width: int = 16
    pool: int = 128
    screen: int = 64


DRY_SIZES = Sizes(prompts=2, rollouts=32, trees=4, width=4, pool=16, screen=8)


def main() -> None:
    """Measure, or write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, help="folder that warm_up.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--estimators", nargs="+", choices=ESTIMATORS, default=list(ESTIMATORS), metavar="NAME")
    parser.add_argument("--dry-run", action="store_true", help="small numbers, for a CPU")
    parser.add_argument("--any-rate", action="store_true", help="take prompts of any pass rate, for a dry run")
    parser.add_argument("--report", action="store_true")
    for name in Sizes.__slots__:
        parser.add_argument(f"--{name}", type=int, help="by default that of Sizes")
    options = parser.parse_args()
    try:
        run(options)
    except TreepackError as error:
        raise SystemExit(f"error: {error}") from error


def run(options: argparse.Namespace) -> None:
    """Measure the gradients, or write the report, by the options of `main`."""
    if options.report:
        for text in write_report(options.out):
            print(text)
        return
    if options.policy is None:
        raise TreepackError("no --policy was given; write one with warm_up.py")
    given = {name: getattr(options, name) for name in Sizes.__slots__}
    sizes = replace(
        DRY_SIZES if options.dry_run else Sizes(), **{name: value for name, value in given.items() if value is not None}
    )
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"credit-{load_task(options.policy).name}.jsonl"
    learner = start_learner(options.policy, device=options.device, rate=0.0, rows=1024)
    wanted = (0.0, 1.0) if options.any_rate else (LOW, HIGH)
    reference, known = start_record(path, learner, sizes, wanted=wanted)
    left = [name for name in options.estimators if name not in known]
    print(f"{path}: {len(options.estimators) - len(left)} of {len(options.estimators)} estimators exist", flush=True)
    with path.open("a") as file:
        for record in measure(learner, reference, sizes, left):
            file.write(json.dumps(record) + "\n")
            file.flush()
            print(record["estimator"], flush=True)


@dataclass(frozen=True, slots=True)
class Reference:
    """The prompts of a run, and the two halves of the reference, float32 [2, P] on the policy's device."""

    queries: list[Query]
    halves: Tensor


def start_record(
    path: Path, learner: Learner, sizes: Sizes, *, wanted: tuple[float, float] = (LOW, HIGH)
) -> tuple[Reference, set[str]]:
    """Start or continue a record, and return the reference and the names of the estimators that it has.

    `wanted` are the smallest and the largest pass rate of the prompts in the screening. The record's first line has
    `halves`, the products of the two halves [2, 2], and the pass rates of the prompts.

    Raises:
        TreepackError: the record has other sizes, or too few prompts can be used.
    """
    queries = screened(learner, sizes, *wanted)
    saved = path.with_name(f"halves-{learner.task.name}.pt")
    names = {"task": learner.task.name, "sizes": {name: getattr(sizes, name) for name in Sizes.__slots__}}
    if path.exists() and saved.exists():
        first, *records = read_records(path)
        if first["sizes"] != names["sizes"]:
            raise TreepackError(f"{path}: was measured with the sizes {first['sizes']}; give them, or a new --out")
        # The last line may be incomplete.
        path.write_text("".join(json.dumps(record) + "\n" for record in (first, *records)))
        halves = torch.load(saved).to(learner.policy.device)
        return Reference(queries, halves), {record["estimator"] for record in records}
    batches = reference_batches(learner, queries, sizes)
    halves, rates = reference_halves(learner.policy, batches, capacity=learner.capacity)
    torch.save(halves.cpu(), saved)
    path.write_text(json.dumps(names | {"halves": products(halves, halves), "rates": rates.tolist()}) + "\n")
    return Reference(queries, halves), set()


def measure(
    learner: Learner, reference: Reference, sizes: Sizes, estimators: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield a record for each estimator.

    It has `gram` [T, T], the products of the estimator's vectors, `dots` [2, T], their products with the two halves,
    and `decoded` [T], tokens. T are the trees of each prompt; vector t is the mean over tree t of all prompts.
    """
    task, capacity = learner.task, learner.capacity
    shapes = {True: tree_shape(task, sizes.width), False: task.independent(sizes.width)}
    used = {ESTIMATORS[name].on_trees for name in estimators}
    trees = {on_trees: sampled(learner, reference.queries, shapes[on_trees], sizes.trees) for on_trees in used}
    tries = {on_trees: [trie_of(each) for each in trees[on_trees]] for on_trees in used}
    for name in estimators:
        estimator = ESTIMATORS[name]
        vectors = torch.stack(
            [
                estimator_gradient(learner.policy, each, estimator, segment=learner.segment, capacity=capacity)
                for each in tries[estimator.on_trees]
            ]
        )
        yield {
            "estimator": name,
            "gram": products(vectors, vectors),
            "dots": products(reference.halves, vectors),
            "decoded": [sum(tree.usage.decoded for tree in each) for each in trees[estimator.on_trees]],
        }


def screened(learner: Learner, sizes: Sizes, low: float, high: float) -> list[Query]:
    """Return the first prompts of the pool with a pass rate from `low` to `high`.

    Raises:
        TreepackError: there are too few.
    """
    pool = learner.task.queries(sizes.pool, seed=PROMPT_SEED)
    rates = pass_rates(sample_trees(learner.task, pool, learner.engine, learner.task.independent(sizes.screen), seed=1))
    chosen = [query for query, rate in zip(pool, rates.tolist(), strict=True) if low <= rate <= high][: sizes.prompts]
    if len(chosen) < sizes.prompts:
        raise TreepackError(
            f"only {len(chosen)} of {sizes.pool} prompts have a pass rate from {low} to {high}; lower --prompts, raise "
            "--pool, or train the policy longer with warm_up.py"
        )
    return chosen


def reference_batches(
    learner: Learner, queries: Sequence[Query], sizes: Sizes
) -> Iterator[tuple[list[Tree], list[Tree]]]:
    """Yield the rollouts of the two halves for each part of the prompts."""
    half = max(1, sizes.rollouts // 2)
    at_once = max(1, AT_ONCE // sizes.rollouts)
    for begin in range(0, len(queries), at_once):
        part = queries[begin : begin + at_once]
        one, other = (
            sample_trees(learner.task, part, learner.engine, learner.task.independent(half), seed=seed)
            for seed in (2, 3)
        )
        yield one, other


def sampled(learner: Learner, queries: Sequence[Query], shape: TreeOptions, num: int) -> list[list[Tree]]:
    """Return `num` lists of one tree for each query."""
    return [
        sample_trees(learner.task, queries, learner.engine, shape, seed=TREE_SEED + number) for number in range(num)
    ]


def products(one: Tensor, other: Tensor) -> list[list[float]]:
    """Return the inner products of the vectors [a, P] and [b, P] as lists [a][b], summed in float64."""
    # In parts, because a copy of all vectors in float64 would take three times their memory.
    total = torch.zeros(len(one), len(other), dtype=torch.float64, device=one.device)
    for part, of_other in zip(torch.split(one, 1 << 18, dim=1), torch.split(other, 1 << 18, dim=1), strict=True):
        total += part.double() @ of_other.double().T
    rows: list[list[float]] = total.tolist()
    return rows


if __name__ == "__main__":
    main()
