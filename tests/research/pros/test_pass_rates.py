"""Pass rates: Polya-Gamma draws by their moments, the sampler against integrals, algebra and its own simulations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.refusal import refusal
from treepack.research.pros import pass_rates, polya_gamma
from treepack.research.pros.options import GibbsLength, OddsPrior
from treepack.research.pros.pass_rates import conditional, estimate
from treepack.trajectory import Float64, Int64

Family = tuple[list[int], list[float], list[float]]


def moments(shape: float, tilt: float) -> tuple[float, float]:
    """Return mean and variance of PG(shape, tilt), from its cumulant function b log(cosh(c / 2) / cosh(sqrt(..)))."""
    if tilt == 0:
        return shape / 4, shape / 24
    mean = shape / (2 * tilt) * np.tanh(tilt / 2)
    return float(mean), float(shape / (4 * tilt**3) * (np.sinh(tilt) - tilt) / np.cosh(tilt / 2) ** 2)


@pytest.mark.parametrize("shape", [0.01, 0.4, 1.0, 3.7, 60.5])
@pytest.mark.parametrize("tilt", [0.0, 1.0, 5.0])
def test_polya_gamma_draws_have_the_mean_and_variance_of_the_distribution(shape: float, tilt: float) -> None:
    size = 200_000
    draws = polya_gamma.draw(np.full(size, shape), np.full(size, tilt), np.random.default_rng(0))
    # 4.5 standard errors: a chance of 1e-5 to fail, and the seed is fixed.
    mean, variance = moments(shape, tilt)
    squares = (draws - mean) ** 2
    assert abs(draws.mean() - mean) < 4.5 * np.sqrt(variance / size)
    assert abs(squares.mean() - variance) < 4.5 * squares.std() / np.sqrt(size)


def test_the_likelihood_that_is_sampled_is_the_logistic_one_to_the_error_that_is_stated() -> None:
    for reach, error in ((6.0, 3e-6), (10.0, 6e-5)):
        psi = np.linspace(-reach, reach, 2001)
        largest = np.abs(polya_gamma.log_likelihood_error(psi)).max()
        # Not far below the stated bound either, or the page would be too pessimistic.
        assert error / 10 < largest < error


@st.composite
def families(draw: st.DrawFn) -> Family:
    """Draw parents, passed and tried of a few queries in any order, often without any rollout."""
    count = draw(st.integers(1, 6))
    originals = draw(st.integers(1, count))
    parent = [-1] * originals + [draw(st.integers(0, originals - 1)) for _ in range(count - originals)]
    tried = [draw(st.sampled_from([0.0, 0.0, 1.0, 2.5, 8.0])) for _ in parent]
    passed = [t * draw(st.sampled_from([0.0, 0.3, 1.0])) for t in tried]
    order = draw(st.permutations(range(count)))
    # Renumber the parents: order [2, 0, 1] puts query 2 first, so place {2: 0, 0: 1, 1: 2}.
    place = {old: new for new, old in enumerate(order)}
    moved = [-1 if parent[old] < 0 else place[parent[old]] for old in order]
    return moved, [passed[old] for old in order], [tried[old] for old in order]


def arrays(family: Family) -> tuple[Int64, Float64, Float64]:
    return np.array(family[0], np.int64), np.array(family[1]), np.array(family[2])


@given(family=families(), mu=st.sampled_from([0.0, -1.0]), sigma=st.sampled_from([0.3, 1.0, 2.0]))
def test_given_polya_gamma_variables_the_queries_are_the_gaussian_of_the_model(
    family: Family, mu: float, sigma: float
) -> None:
    parent, passed, tried = arrays(family)
    prior = OddsPrior(mu, 1.5, sigma)
    omega = tried * np.linspace(0.1, 0.3, len(tried))
    # The log density is -psi' P psi / 2 + linear' psi: P and linear have a term per query and one per prior edge.
    precision, linear = np.diag(omega), passed - tried / 2
    for i, up in enumerate(parent.tolist()):
        if up < 0:
            precision[i, i] += 1.5**-2
            linear[i] += mu * 1.5**-2
        else:
            precision[np.ix_([i, up], [i, up])] += np.array([[1, -1], [-1, 1]]) / sigma**2
    covariance = np.linalg.inv(precision)
    gaussian = conditional(parent, passed - tried / 2, omega, prior)
    np.testing.assert_allclose(gaussian.mean, covariance @ linear, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gaussian.variance, np.diag(covariance), rtol=1e-9)
    # The shrinkage is the regression of a derived query on its parent: Cov(i, parent) / Var(parent).
    derived = np.flatnonzero(parent >= 0)
    above = parent[derived]
    np.testing.assert_allclose(
        gaussian.shrinkage[derived], covariance[derived, above] / covariance[above, above], rtol=1e-9
    )
    np.testing.assert_allclose(
        (gaussian.pull + gaussian.shrinkage * gaussian.mean[parent])[derived],
        gaussian.mean[derived],
        rtol=1e-9,
        atol=1e-12,
    )


def integrals(family: Family, prior: OddsPrior) -> tuple[Float64, Float64]:
    """Return posterior mean and deviation of every log-odds by sums over a grid, without sampling."""
    parent, passed, tried = arrays(family)
    # Steps of 0.02 over -14 .. 14, where every prior and posterior of the cases below has all its mass.
    grid = np.linspace(-14, 14, 1401)
    likelihood = np.exp(passed[:, None] * grid - tried[:, None] * np.logaddexp(0, grid))
    step = np.exp(-(((grid[:, None] - grid) / prior.sigma) ** 2) / 2)  # [psi of a derived query, psi of its parent]
    step /= step.sum(axis=0)
    mean, deviation = np.zeros(len(parent)), np.zeros(len(parent))
    for top in np.flatnonzero(parent < 0).tolist():
        below = np.flatnonzero(parent == top).tolist()
        # joint [grid]: density of the parent with all of its derived queries integrated out.
        joint = np.exp(-(((grid - prior.mu) / prior.tau) ** 2) / 2) * likelihood[top]
        for i in below:
            joint = joint * (likelihood[i] @ step)
        of_query = {top: joint}
        for i in below:
            # Remove the query's own factor from the joint density, and integrate over its parent.
            of_query[i] = likelihood[i] * (step @ (joint / (likelihood[i] @ step)))
        for i, density in of_query.items():
            mean[i] = (density * grid).sum() / density.sum()
            deviation[i] = np.sqrt((density * (grid - mean[i]) ** 2).sum() / density.sum())
    return mean, deviation


# Families (parent, passed, tried) and priors: one query, no success, untried parents, fractional counts, two families
# in one call, and a parent that comes after its derived queries.
SMALL: list[tuple[Family, OddsPrior]] = [
    (([-1], [3.0], [4.0]), OddsPrior()),
    (([-1], [0.0], [8.0]), OddsPrior(sigma=0.5)),
    (([-1, 0], [0.0, 1.0], [0.0, 1.0]), OddsPrior(mu=-1.0)),
    (([-1, 0, 0, 0], [7.3, 0.0, 2.25, 0.0], [8.1, 0.0, 4.5, 3.9]), OddsPrior()),
    (([-1, -1, 0, 1, 1], [0.81, 8.0, 4.0, 0.0, 20.0], [0.9, 8.0, 16.0, 2.0, 40.0]), OddsPrior(0.5, 1.0, 2.0)),
    (([2, 2, -1], [8.0, 0.0, 0.01], [8.0, 8.0, 0.02]), OddsPrior(sigma=0.2)),
]


@pytest.mark.parametrize(("family", "prior"), SMALL)
def test_the_sampler_finds_the_integrals_of_small_families(family: Family, prior: OddsPrior) -> None:
    mean, deviation = integrals(family, prior)
    copies = 32  # the same family many times in one call: its spread is the error of one run
    parent, passed, tried = arrays(family)
    many = np.concatenate([np.where(parent < 0, -1, parent + i * len(parent)) for i in range(copies)])
    log_odds = estimate(
        many, np.tile(passed, copies), np.tile(tried, copies), prior=prior, sampling=GibbsLength(1000, burn_in=200)
    )
    for values, expected in ((log_odds.mean, mean), (log_odds.deviation, deviation)):
        runs = values.reshape(copies, -1)
        error = runs.std(axis=0, ddof=1) / np.sqrt(copies)
        assert (error < 0.02).all()
        assert (np.abs(runs.mean(axis=0) - expected) < 4 * error + 1e-6).all()


def test_default_runs_are_near_the_integrals() -> None:
    for family, prior in SMALL:
        mean, deviation = integrals(family, prior)
        log_odds = estimate(*arrays(family), prior=prior)
        assert (np.abs(log_odds.mean - mean) < 0.2 * deviation).all()
        assert (np.abs(log_odds.deviation - deviation) < 0.1 * deviation).all()


def test_of_queries_that_nobody_tried_the_prior_is_all_that_is_known() -> None:
    log_odds = estimate(
        np.array([-1, 0, -1]), np.array([0.0, 0, 2]), np.array([0.0, 0, 2]), prior=OddsPrior(-0.5, 1.5, 2.0)
    )
    assert log_odds.mean[:2].tolist() == [-0.5, -0.5]
    assert log_odds.deviation[:2].tolist() == [1.5, 2.5]
    assert log_odds.mean[2] > 0
    np.testing.assert_allclose(log_odds.pass_rate, 1 / (1 + np.exp(-log_odds.mean)))


@settings(max_examples=30)
@given(family=families())
def test_an_untried_derived_query_is_where_its_parent_is(family: Family) -> None:
    parent, passed, tried = arrays(family)
    log_odds = estimate(parent, passed, tried, sampling=GibbsLength(5, burn_in=0))
    idle = (parent >= 0) & (tried == 0)
    np.testing.assert_allclose(log_odds.mean[idle], log_odds.mean[parent[idle]], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(log_odds.deviation[idle] ** 2, log_odds.deviation[parent[idle]] ** 2 + 1, rtol=1e-9)


def test_estimates_depend_on_the_seed_and_not_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_rates, "BLOCK", 16)
    rng = np.random.default_rng(0)
    parent = np.concatenate([np.full(60, -1), rng.integers(0, 60, 140)])
    tried = rng.integers(0, 5, 200).astype(np.float64)
    passed = np.floor(tried * rng.random(200))
    # Blocks of 16 queries, so that several threads have work.
    one, two, other = (
        estimate(parent, passed, tried, prior=OddsPrior(1.0), sampling=GibbsLength(20, burn_in=2, **how)).mean
        for how in ({}, {"workers": 3}, {"seed": 1})
    )
    assert one.tobytes() == two.tobytes()
    assert (one != other)[tried > 0].all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: OddsPrior(mu=float("nan")), "mu is nan; expected log-odds between -30 and 30"),
        (lambda: OddsPrior(tau=0.0), "tau is 0.0; expected a deviation between 0.001 and 1000"),
        (lambda: OddsPrior(sigma=-1.0), "sigma is -1.0; expected a deviation"),
        (lambda: GibbsLength(sweeps=0), "sweeps is 0; expected at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(call: Any, message: str) -> None:
    assert message in refusal(call)
