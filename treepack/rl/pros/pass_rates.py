"""Pass rates of queries and of the queries derived from them, from few rewards: PROS's two-level logit-normal model.

    parent [n], passed [n], tried [n] --estimate--> log-odds: posterior mean and deviation of each query

    psi of an original query   ~ N(mu, tau^2)                    rewards of a query ~ Bernoulli(sigmoid(psi))
    psi of one derived from it ~ N(psi of its parent, sigma^2)   counts may be fractions: see `selection.forget`

Given one Polya-Gamma variable w ~ PG(tried, psi) per query (PROS, section 4, propositions 4.1 and 4.2), all psi are
Gaussian. With kappa = passed - tried / 2 and, for a derived query i, the shrinkage c_i = 1 / (1 + w_i sigma^2):

    parent    precision P = 1 / tau^2 + w + sum_i w_i c_i      mean M = (mu / tau^2 + kappa + sum_i kappa_i c_i) / P
    derived   mean (kappa_i sigma^2 + psi of the parent) c_i   variance sigma^2 c_i

The parent's line has its derived queries integrated out, so a family is drawn as a whole: it mixes faster than one
query at a time, and queries that nobody tried, whose w is 0, need not be drawn at all. Estimates average these
conditional means rather than the draws, which takes far fewer sweeps for the same error.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from treepack.errors import TreepackError
from treepack.rl.pros import polya_gamma
from treepack.trajectory import Float64, Int64

BLOCK = 1 << 15  # queries that are sampled together, with random numbers of their own


@dataclass(frozen=True)
class Prior:
    """The model's constants: mean and deviation of original log-odds, deviation of derived ones around them.

    The default tau makes the pass rate of a query of which nothing is known almost uniform in (0, 1).
    """

    mu: float = 0.0
    tau: float = 1.6
    sigma: float = 1.0

    def __post_init__(self) -> None:
        """Refuse values that make no sense, naming the option."""
        if not abs(self.mu) <= 30:
            raise TreepackError(f"mu is {self.mu}; expected log-odds between -30 and 30")
        for name in ("tau", "sigma"):
            if not 1e-3 <= getattr(self, name) <= 1e3:
                raise TreepackError(f"{name} is {getattr(self, name)}; expected a deviation between 0.001 and 1000")


@dataclass(frozen=True)
class Sampling:
    """How long the Gibbs sampler runs: `burn_in` sweeps that are not used, then `sweeps` that are.

    The result depends on `seed`, not on `workers`, the threads.
    """

    sweeps: int = 200
    burn_in: int = 50
    seed: int = 0
    workers: int = 1

    def __post_init__(self) -> None:
        """Refuse values that make no sense, naming the option."""
        for name, least in (("sweeps", 1), ("burn_in", 0), ("seed", 0), ("workers", 1)):
            if getattr(self, name) < least:
                raise TreepackError(f"{name} is {getattr(self, name)}; expected {least} or more")


@dataclass(frozen=True, slots=True)
class Conditional:
    """All psi given the Polya-Gamma variables, one entry per query; a derived query's mean is `pull + c psi_parent`.

    `mean` and `variance` are those of each query on its own, its parent integrated out.
    """

    mean: Float64
    variance: Float64
    shrinkage: Float64
    pull: Float64


@dataclass(frozen=True, slots=True)
class LogOdds:
    """Posterior mean and standard deviation of each query's log-odds, float64 [n]."""

    mean: Float64
    deviation: Float64

    @property
    def pass_rate(self) -> Float64:
        """The sigmoid of the mean: PROS's point estimate of the pass rate, float64 [n]."""
        rate: Float64 = 0.5 * (1 + np.tanh(self.mean / 2))
        return rate


def estimate(
    parent: Int64,
    passed: Float64,
    tried: Float64,
    *,
    prior: Prior = Prior(),
    sampling: Sampling = Sampling(),
) -> LogOdds:
    """Posterior of the log-odds of n queries, which passed `passed` of `tried` times, 0 <= passed <= tried.

    `parent` int64 [n] is the index of the query it is derived from, -1 for an original one; parents are original.
    O(n sweeps). Families of which nothing was tried have the prior, without sampling.
    """
    found = LogOdds(np.full(len(parent), prior.mu), _prior_deviation(parent, prior))
    family = np.where(parent < 0, np.arange(len(parent)), parent)
    known = np.bincount(family, weights=tried, minlength=len(parent))[family] > 0
    members = np.flatnonzero(known)
    # Original queries first within their family, families one after the other.
    members = members[np.lexsort((parent[members] >= 0, family[members]))]
    blocks = _blocks(family[members])
    streams = np.random.SeedSequence(sampling.seed).spawn(len(blocks))

    def run(number: int) -> None:
        begin, end = blocks[number]
        mine = members[begin:end]
        above = np.searchsorted(family[mine], family[mine])  # the first of a family is its original query
        local = np.where(parent[mine] < 0, -1, above)
        rng = np.random.Generator(np.random.PCG64(streams[number]))
        mean, deviation = _posterior(local, passed[mine], tried[mine], prior, sampling, rng)
        found.mean[mine], found.deviation[mine] = mean, deviation

    with ThreadPoolExecutor(sampling.workers) as pool:
        list(pool.map(run, range(len(blocks))))
    return found


def _prior_deviation(parent: Int64, prior: Prior) -> Float64:
    derived = np.hypot(prior.tau, prior.sigma)
    return np.where(parent < 0, prior.tau, derived).astype(np.float64)


def _blocks(family: Int64) -> list[tuple[int, int]]:
    """Runs of whole families, of `BLOCK` queries or a little more."""
    starts = np.flatnonzero(np.diff(family, prepend=-1))
    first = starts[np.flatnonzero(np.diff(starts // BLOCK, prepend=-1))].tolist()
    return list(itertools.pairwise([*first, len(family)]))


def _posterior(
    parent: Int64, passed: Float64, tried: Float64, prior: Prior, sampling: Sampling, rng: np.random.Generator
) -> tuple[Float64, Float64]:
    """Mean and deviation of the log-odds of one block: averages of what is known given the Polya-Gamma variables."""
    sums = np.zeros((3, len(parent)))
    for sweep, (_, given) in enumerate(sample(parent, passed, tried, prior=prior, rng=rng)):
        if sweep >= sampling.burn_in:
            away = given.mean - prior.mu
            sums += away, away * away, given.variance
        if sweep + 1 == sampling.burn_in + sampling.sweeps:
            break
    mean, square, variance = sums / sampling.sweeps
    return prior.mu + mean, np.sqrt(variance + np.maximum(square - mean * mean, 0))


def sample(
    parent: Int64, passed: Float64, tried: Float64, *, prior: Prior, rng: np.random.Generator
) -> Iterator[tuple[Float64, Conditional]]:
    """Sweeps of the Gibbs sampler, for ever: a draw of every psi, and the Gaussian it was drawn from."""
    kappa = passed - tried / 2
    seen = np.flatnonzero(tried > 0)
    counts = tried[seen]
    omega, psi = np.zeros(len(parent)), np.full(len(parent), prior.mu)
    original = parent < 0
    while True:
        omega[seen] = polya_gamma.draw(counts, psi[seen], rng)
        given = conditional(parent, kappa, omega, prior)
        noise = rng.standard_normal(len(parent))
        psi = given.mean + noise * np.sqrt(given.variance)  # right for original queries; derived ones follow
        psi = np.where(
            original, psi, given.pull + given.shrinkage * psi[parent] + noise * prior.sigma * np.sqrt(given.shrinkage)
        )
        yield psi, given


def conditional(parent: Int64, kappa: Float64, omega: Float64, prior: Prior) -> Conditional:
    """The psi of all queries given their Polya-Gamma variables `omega`: the two lines at the top of this file."""
    derived = np.flatnonzero(parent >= 0)
    above = parent[derived]
    shrinkage, pull = np.ones(len(parent)), np.zeros(len(parent))
    shrinkage[derived] = 1 / (1 + omega[derived] * prior.sigma**2)
    pull[derived] = kappa[derived] * prior.sigma**2 * shrinkage[derived]

    def of_derived(values: Float64) -> Float64:
        sums: Float64 = np.bincount(above, values[derived] * shrinkage[derived], len(parent)).astype(np.float64)
        return sums

    precision = prior.tau**-2 + omega + of_derived(omega)
    mean = (prior.mu * prior.tau**-2 + kappa + of_derived(kappa)) / precision
    variance = 1 / precision
    mean[derived] = pull[derived] + shrinkage[derived] * mean[above]
    variance[derived] = prior.sigma**2 * shrinkage[derived] + shrinkage[derived] ** 2 * variance[above]
    return Conditional(mean, variance, shrinkage, pull)
