"""Pass rates of queries and of the queries derived from them, from few rewards: the two-level logit-normal of PROS.

    parent [n], passed [n], tried [n] --estimate--> log-odds: posterior mean and deviation of each query

    psi of an original query   ~ N(mu, tau^2)                    rewards of a query ~ Bernoulli(sigmoid(psi))
    psi of a derived query     ~ N(psi of its parent, sigma^2)   counts may be fractions, see `selection.forget_and_add`

Given one Polya-Gamma variable w ~ PG(tried, psi) per query (PROS, section 4, propositions 4.1 and 4.2), all psi are
Gaussian. Let kappa = passed - tried / 2, and let c_i = 1 / (1 + w_i sigma^2) be the shrinkage of a derived query i:

    parent    precision P = 1 / tau^2 + w + sum_i w_i c_i      mean M = (mu / tau^2 + kappa + sum_i kappa_i c_i) / P
    derived   mean (kappa_i sigma^2 + psi of the parent) c_i   variance sigma^2 c_i

The parent's line integrates its derived queries out, so a family is drawn as a whole. This mixes faster than drawing
one query at a time, and queries without any rollout, whose w is 0, need no draw. Estimates average these conditional
means instead of the draws, which needs far fewer sweeps for the same error.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from treepack.research.pros import polya_gamma
from treepack.research.pros.options import GibbsLength, OddsPrior
from treepack.trajectory import Float64, Int64

# Queries that are sampled together with one random stream. The result depends on it, and not on the number of threads.
# A million queries are 31 blocks, which is enough work to share.
BLOCK = 1 << 15


@dataclass(frozen=True, slots=True)
class _ConditionalOdds:
    """Distribution of psi given the Polya-Gamma variables, each float64 [n], one entry per query.

    `mean` and `variance` describe each query alone, with its parent integrated out. Given the psi of its parent, the
    mean of a derived query is `pull + shrinkage * psi_parent`.
    """

    mean: Float64
    variance: Float64
    shrinkage: Float64
    pull: Float64


@dataclass(frozen=True, slots=True)
class _LogOdds:
    """Posterior mean and standard deviation of each query's log-odds, float64 [n]."""

    mean: Float64
    deviation: Float64

    @property
    def pass_rate(self) -> Float64:
        """The sigmoid of the mean, which is the point estimate of the pass rate in PROS; float64 [n]."""
        # mean [0, 1, -3] -> [0.5, 0.731, 0.047]; tanh does not overflow, unlike exp.
        rate: Float64 = 0.5 * (1 + np.tanh(self.mean / 2))
        return rate


def estimate(
    parent: Int64,
    passed: Float64,
    tried: Float64,
    *,
    prior: OddsPrior = OddsPrior(),  # noqa: B008 (immutable)
    sampling: GibbsLength = GibbsLength(),  # noqa: B008 (immutable)
) -> _LogOdds:
    """Estimate the posterior log-odds of n queries that passed `passed` of `tried` times, 0 <= passed <= tried.

    `parent` int64 [n] is the index of the query from which each one is derived, -1 for an original query. Parents are
    original queries. O(n sweeps). A family without any rollout has the prior, without sampling.
    """
    log_odds = _LogOdds(np.full(len(parent), prior.mu), _prior_deviation(parent, prior))
    family = np.where(parent < 0, np.arange(len(parent)), parent)
    has_rollouts = np.bincount(family, weights=tried, minlength=len(parent))[family] > 0
    members = np.flatnonzero(has_rollouts)
    # Families one after the other, each with its original query first: parent [-1, -1, 0, 1] -> members [0, 2, 1, 3].
    members = members[np.lexsort((parent[members] >= 0, family[members]))]
    blocks = _blocks(family[members])
    streams = np.random.SeedSequence(sampling.seed).spawn(len(blocks))

    def run(number: int) -> None:
        begin, end = blocks[number]
        block = members[begin:end]
        above = np.searchsorted(family[block], family[block])  # the first of a family is its original query
        local = np.where(parent[block] < 0, -1, above)
        rng = np.random.Generator(np.random.PCG64(streams[number]))
        mean, deviation = _posterior(local, passed[block], tried[block], prior, sampling, rng)
        log_odds.mean[block], log_odds.deviation[block] = mean, deviation

    with ThreadPoolExecutor(sampling.workers) as pool:
        list(pool.map(run, range(len(blocks))))  # list() raises the error of a thread, if there is one
    return log_odds


def _prior_deviation(parent: Int64, prior: OddsPrior) -> Float64:
    derived = np.hypot(prior.tau, prior.sigma)
    return np.where(parent < 0, prior.tau, derived).astype(np.float64)


def _blocks(family: Int64) -> list[tuple[int, int]]:
    """Divide the queries into runs of whole families, of about `BLOCK` queries each."""
    # With BLOCK = 4, family [0, 0, 2, 2, 2, 5, 6] starts at [0, 2, 5, 6]; a block starts with the first family of each
    # multiple of 4 -> (0, 5), (5, 7).
    starts = np.flatnonzero(np.diff(family, prepend=-1))
    first = starts[np.flatnonzero(np.diff(starts // BLOCK, prepend=-1))].tolist()
    return list(itertools.pairwise([*first, len(family)]))


def _posterior(
    parent: Int64, passed: Float64, tried: Float64, prior: OddsPrior, sampling: GibbsLength, rng: np.random.Generator
) -> tuple[Float64, Float64]:
    """Return mean and deviation of the log-odds of one block, averaged over sweeps of the sampler."""
    # Sums over sweeps of the conditional mean, its square and the conditional variance, [3, n]. Means are taken from
    # mu, because a variance from large sums of squares would lose digits.
    sums = np.zeros((3, len(parent)))
    for sweep, (_, gaussian) in enumerate(sample(parent, passed, tried, prior=prior, rng=rng)):
        if sweep >= sampling.burn_in:
            apart = gaussian.mean - prior.mu
            sums += apart, apart * apart, gaussian.variance
        if sweep + 1 == sampling.burn_in + sampling.sweeps:
            break
    # The law of total variance: mean of the variances plus variance of the means.
    mean, square, variance = sums / sampling.sweeps
    return prior.mu + mean, np.sqrt(variance + np.maximum(square - mean * mean, 0))


def sample(
    parent: Int64, passed: Float64, tried: Float64, *, prior: OddsPrior, rng: np.random.Generator
) -> Iterator[tuple[Float64, _ConditionalOdds]]:
    """Yield sweeps of the Gibbs sampler without end: a draw of every psi, and the Gaussian of the draw."""
    kappa = passed - tried / 2
    # Queries without rollouts keep omega 0, so they carry no information.
    has_rollouts = np.flatnonzero(tried > 0)
    counts = tried[has_rollouts]
    omega, psi = np.zeros(len(parent)), np.full(len(parent), prior.mu)
    original = parent < 0
    while True:
        omega[has_rollouts] = polya_gamma.draw(counts, psi[has_rollouts], rng)
        gaussian = conditional(parent, kappa, omega, prior)
        noise = rng.standard_normal(len(parent))
        # First the original queries, whose draws are final, and then the derived ones given the draw of their parent.
        psi = gaussian.mean + noise * np.sqrt(gaussian.variance)
        derived = gaussian.pull + gaussian.shrinkage * psi[parent] + noise * prior.sigma * np.sqrt(gaussian.shrinkage)
        psi = np.where(original, psi, derived)
        yield psi, gaussian


def conditional(parent: Int64, kappa: Float64, omega: Float64, prior: OddsPrior) -> _ConditionalOdds:
    """Return the distribution of all psi given their Polya-Gamma variables `omega`: the two lines of the header."""
    # parent [-1, 0], kappa [1, -1], omega [0.5, 1], mu 0, tau = sigma = 1: shrinkage [1, 0.5], precision of the parent
    # 1 + 0.5 + 1 * 0.5 = 2 -> mean [0.25, -0.375], variance [0.5, 0.625].
    derived = np.flatnonzero(parent >= 0)
    above = parent[derived]
    shrinkage, pull = np.ones(len(parent)), np.zeros(len(parent))
    shrinkage[derived] = 1 / (1 + omega[derived] * prior.sigma**2)
    pull[derived] = kappa[derived] * prior.sigma**2 * shrinkage[derived]

    def sum_of_derived(values: Float64) -> Float64:
        # sum_i values_i c_i over the derived queries of each query, [n].
        sums: Float64 = np.bincount(above, values[derived] * shrinkage[derived], len(parent)).astype(np.float64)
        return sums

    precision = prior.tau**-2 + omega + sum_of_derived(omega)
    mean = (prior.mu * prior.tau**-2 + kappa + sum_of_derived(kappa)) / precision
    variance = 1 / precision
    # The parent's uncertainty adds to the variance of a derived query, reduced by the shrinkage.
    mean[derived] = pull[derived] + shrinkage[derived] * mean[above]
    variance[derived] = prior.sigma**2 * shrinkage[derived] + shrinkage[derived] ** 2 * variance[above]
    return _ConditionalOdds(mean, variance, shrinkage, pull)
