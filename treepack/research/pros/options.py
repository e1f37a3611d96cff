"""Options of the estimate of pass rates. This file imports no numerical library, because a page of help reads it."""

from __future__ import annotations

from dataclasses import dataclass

from treepack.errors import TreepackError
from treepack.option_fields import check_options, option


@dataclass(frozen=True)
class OddsPrior:
    """The constants of the model: mean and deviation of original log-odds, and deviation of derived ones around them.

    With the default tau, the pass rate of a query without rollouts is almost uniform in (0, 1).
    """

    # The paper gives no values.
    mu: float = option(0.0, "Mean log-odds of original queries.")
    tau: float = option(1.6, "Standard deviation of these log-odds.")
    sigma: float = option(1.0, "Standard deviation of the log-odds of augmented queries around their parent's.")

    def __post_init__(self) -> None:
        """Check every value and name the option that is wrong.

        Raises:
            TreepackError: a value outside its range.
        """
        # Log-odds of 30 are a pass rate of 1 - 10^-13; a larger mean is a mistake.
        if not abs(self.mu) <= 30:
            raise TreepackError(f"mu is {self.mu}; expected log-odds between -30 and 30")
        for name in ("tau", "sigma"):
            if not 1e-3 <= getattr(self, name) <= 1e3:
                raise TreepackError(f"{name} is {getattr(self, name)}; expected a deviation between 0.001 and 1000")


@dataclass(frozen=True)
class GibbsLength:
    """Length of the Gibbs sampler: `burn_in` sweeps that are discarded, then `sweeps` that are averaged.

    The result depends on `seed`, but not on `workers`, the number of threads.
    """

    # With these, means of the families in the tests are within a fifth of a posterior deviation of the integrals.
    sweeps: int = option(200, "Sweeps of the Gibbs sampler.", minimum=1)
    burn_in: int = option(50, "Sweeps to discard before these.", minimum=0)
    seed: int = option(0, "Seed of the sampler.", minimum=0, maximum=2**63 - 1)
    workers: int = option(1, "Threads; the result is the same.", minimum=1)

    def __post_init__(self) -> None:
        """Check every value and name the option that is wrong.

        Raises:
            TreepackError: a value below its minimum.
        """
        check_options(self)
