"""Polya-Gamma variables of any positive shape: what makes the logistic likelihood Gaussian.

    shape b, tilt c --draw--> w ~ PG(b, c)        (Polson, Scott and Windle, arXiv 1205.0310)

    exp(k psi) / (1 + exp(psi))^b  =  2^-b exp((k - b/2) psi) E[exp(-w psi^2 / 2)],   w ~ PG(b, 0)

Shapes are counts of rollouts that have partly been forgotten, so they are fractions. PG(b, 0) is the sum over
k = 1, 2, ... of Gamma(b, rate 2 pi^2 (k - 1/2)^2). The first `NUM_TERMS` are drawn as they are, and the rest as one
gamma variable of the same mean and variance; PG(b, c) adds c^2 / 2 to every rate, which is exact for this sum as it is
for the infinite one. A Gibbs sampler with it is therefore exact for a likelihood, `log_likelihood_error`, that differs
from the logistic one by less than 3e-6 per trial where |psi| < 6, and 6e-5 where |psi| < 10.

The package polyagamma 2.0.2 was measured first: its draws of whole shapes are good, those of fractional shapes are not
(shape 3.7, tilt 0: the variance is 5 % too large, the mean off by 16 standard errors of a million draws).
"""

from __future__ import annotations

import numpy as np

from treepack.trajectory import Float64

NUM_TERMS = 6

_RATES = 2 * np.pi**2 * (np.arange(NUM_TERMS) + 0.5) ** 2
_REST_MEAN = 1 / 4 - float((1 / _RATES).sum())
_REST_VARIANCE = 1 / 24 - float((1 / _RATES**2).sum())
_REST_SHAPE, _REST_RATE = _REST_MEAN**2 / _REST_VARIANCE, _REST_MEAN / _REST_VARIANCE


def draw(shape: Float64, tilt: Float64, rng: np.random.Generator) -> Float64:
    """One draw of PG(shape, tilt) for each entry, float64 [n]; `shape` > 0. Seven gamma draws each."""
    half = 0.5 * tilt * tilt
    total: Float64 = rng.standard_gamma(_REST_SHAPE * shape) / (_REST_RATE + half)
    for rate in _RATES.tolist():
        total += rng.standard_gamma(shape) / (rate + half)
    return total


def log_likelihood_error(psi: Float64) -> Float64:
    """Log of the likelihood of one trial at log-odds `psi` that `draw` is exact for, less that of the logistic one."""
    square = psi[:, None] ** 2 / 2
    drawn = np.log1p(square / _RATES).sum(axis=1) + _REST_SHAPE * np.log1p(square[:, 0] / _REST_RATE)
    error: Float64 = np.logaddexp(psi / 2, -psi / 2) - np.log(2) - drawn
    return error
