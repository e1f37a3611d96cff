"""Pass rates of many queries: seconds of `treepack select` and its state, and true pass rates of selected queries.

    python benchmarks/pass_rates.py [--queries 1000000] [--workers 1]

The timed pool has one original query in ten; twelve training steps have rolled out a fifth of it eight times each.

Then 30 steps roll out 64 queries eight times each, of 500 original queries whose true log-odds are drawn from the model
of `research/pros/pass_rates.py` and change by a deviation of 0.1 a step. In the growing pool, every original query that
passed at a step, or whose augmented query did, gets a new augmented query; in the fixed pool, none does. Queries are
selected at random, by the remembered share of successes (0.5 if there is none), or by `treepack select`. The benchmark
prints the true pass rates of the last 20 steps.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from treepack.research.pros.options import GibbsLength, OddsPrior
from treepack.research.pros.pass_rates import estimate
from treepack.research.pros.selection import (
    QueryCounts,
    empty_state,
    forget_and_add,
    indices_of,
    nearest,
    read_state,
    with_queries,
    write_state,
)
from treepack.trajectory import Float64, Int64

FORGETTING = 0.9
Choice = Callable[[QueryCounts, int], Int64]


def pool(num_original: int, num_queries: int) -> QueryCounts:
    """A state of untried queries, the augmented ones spread evenly over the original ones."""
    originals = [f"q{i:07d}" for i in range(num_original)]
    parents = [originals[i % num_original] for i in range(num_queries - num_original)]
    derived = [f"{parent}~{i:07d}" for i, parent in enumerate(parents)]
    return with_queries(empty_state(), [*originals, *derived], [*[None] * num_original, *parents])[0]


def true_log_odds(state: QueryCounts, rng: np.random.Generator) -> Float64:
    prior, noise = OddsPrior(), rng.standard_normal(state.num_queries)
    original = prior.mu + prior.tau * noise
    return np.where(state.parent < 0, original, original[state.parent] + prior.sigma * noise)


def rolled_out(state: QueryCounts, query: Int64, psi: Float64, rng: np.random.Generator) -> QueryCounts:
    """The state after eight rollouts of each query."""
    eight = np.repeat(query, 8)
    success = rng.random(len(eight)) < 1 / (1 + np.exp(-psi[eight]))
    return forget_and_add(state, eight, success, forgetting=FORGETTING)


def timed(name: str, run: Callable[[], QueryCounts]) -> QueryCounts:
    began = time.perf_counter()
    state = run()
    print(f"{name:<44}{time.perf_counter() - began:8.2f} s")
    return state


def written_and_read(state: QueryCounts, path: Path) -> QueryCounts:
    write_state(state, path)
    return read_state(path)


def speed(num_queries: int, workers: int) -> None:
    """Print the seconds of each stage."""
    rng = np.random.default_rng(0)
    state = timed(f"{num_queries:,} queries join", lambda: pool(num_queries // 10, num_queries))
    psi = true_log_odds(state, rng)
    for _ in range(11):
        state = rolled_out(state, np.flatnonzero(rng.random(num_queries) < 0.2), psi, rng)
    tried = np.flatnonzero(rng.random(num_queries) < 0.2)
    state = timed(f"{8 * len(tried):,} rollouts are counted", lambda: rolled_out(state, tried, psi, rng))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state.parquet")
        timed("the state is written and read", lambda: written_and_read(state, path))
    estimates = []
    for seed in range(2):
        began = time.perf_counter()
        how = GibbsLength(seed=seed, workers=workers)
        estimates.append(estimate(state.parent, state.passed, state.tried, sampling=how))
        print(
            f"{f'pass rates, {how.burn_in + how.sweeps} sweeps, seed {seed}':<44}{time.perf_counter() - began:8.2f} s"
        )
    error = np.sqrt(((estimates[0].mean - estimates[1].mean) ** 2).mean() / 2)
    print(
        f"{'Monte Carlo error of log-odds':<44}{error:8.3f}   posterior deviation {estimates[0].deviation.mean():.2f}"
    )


def simulated(choose: Choice, *, growing: bool) -> str:
    """Share of the queries rolled out whose true pass rate p is in (0.25, 0.75), and the mean of 4 p (1 - p)."""
    rng = np.random.default_rng(1)
    state = pool(500, 500)
    psi, rates = true_log_odds(state, rng), []
    for step in range(30):
        chosen = choose(state, step)
        rates.append(1 / (1 + np.exp(-psi[chosen])))
        before = state.passed[chosen]
        state = rolled_out(state, chosen, psi, rng)
        psi = psi + 0.1 * rng.standard_normal(len(psi))
        if growing:
            passed = chosen[state.passed[chosen] > FORGETTING * before]
            state, psi = with_children(state, psi, passed, f"~{step}", rng)
    rate = np.concatenate(rates[10:])
    near = ((rate > 0.25) & (rate < 0.75)).mean()
    return f"{100 * near:5.1f} % in (0.25, 0.75)   4 p (1 - p) {(4 * rate * (1 - rate)).mean():.3f}"


def with_children(
    state: QueryCounts, psi: Float64, query: Int64, suffix: str, rng: np.random.Generator
) -> tuple[QueryCounts, Float64]:
    """The pool with a new augmented query of the original one of each of `query`, and the true log-odds of all."""
    original = np.unique(np.where(state.parent[query] < 0, query, state.parent[query]))
    names = state.query_id.take(pa.array(original)).to_pylist()
    grown, _ = with_queries(state, [name + suffix for name in names], names)
    log_odds = np.zeros(grown.num_queries)
    log_odds[indices_of(grown, state.query_id)] = psi
    new = indices_of(grown, pa.array([name + suffix for name in names], pa.string()))
    log_odds[new] = psi[original] + OddsPrior().sigma * rng.standard_normal(len(new))
    return grown, log_odds


def at_random(state: QueryCounts, step: int) -> Int64:
    return np.random.default_rng(step).choice(state.num_queries, 64, replace=False).astype(np.int64)


def by_share(state: QueryCounts, step: int) -> Int64:
    share = np.divide(state.passed, state.tried, out=np.full(state.num_queries, 0.5), where=state.tried > 0)
    return nearest(share - 0.5, 64, seed=step)


def by_pass_rate(state: QueryCounts, step: int) -> Int64:
    rates = estimate(state.parent, state.passed, state.tried, sampling=GibbsLength(seed=step))
    return nearest(rates.mean, 64, seed=step)


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queries", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    print(f"{platform.machine()}, Python {platform.python_version()}, {options.workers} threads")
    speed(options.queries, options.workers)
    for growing in (True, False):
        for name, choose in (("at random", at_random), ("share of successes", by_share), ("select", by_pass_rate)):
            line = simulated(choose, growing=growing)
            print(f"{'growing' if growing else 'fixed':<8} {name:<20}{line}")


if __name__ == "__main__":
    main()
