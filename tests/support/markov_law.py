"""A law of responses whose means and probabilities are exact numbers, by linear algebra.

MarkovLaw    the next token depends on the last one: log-probabilities, lengths and pass rates
"""

from __future__ import annotations

import numpy as np

from treepack.trajectory import Float64, Int32


class MarkovLaw:
    """Token t follows token s with the probability `transition[s, t]`; the token `stop` ends a response."""

    def __init__(self, transition: Float64, *, stop: int) -> None:
        assert np.allclose(transition.sum(axis=1), 1)
        self.transition = transition
        self.stop = stop
        self._cumulative = transition.cumsum(axis=1)

    def sample(self, ids: Int32, *, max_tokens: int, rng: np.random.Generator) -> tuple[Int32, Float64]:
        """Sample token by token."""
        state = int(ids[-1])
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < max_tokens and (not tokens or state != self.stop):
            # cumulative [0.2, 0.9, 1.0] and 0.5 -> token 1
            token = int(np.searchsorted(self._cumulative[state], rng.random(), side="right"))
            token = min(token, len(self.transition) - 1)
            logprobs.append(float(np.log(self.transition[state, token])))
            tokens.append(token)
            state = token
        return np.array(tokens, np.int32), np.array(logprobs)

    def mean_length(self, last: int) -> float:
        """Return the mean number of tokens, the stop token included, after the token `last`."""
        # m = 1 + P m over the tokens that do not stop, so m = (1 - P)^-1 1; the first token after `last` counts too.
        goes_on = np.delete(np.arange(len(self.transition)), self.stop)
        inner = self.transition[np.ix_(goes_on, goes_on)]
        means = np.linalg.solve(np.eye(len(goes_on)) - inner, np.ones(len(goes_on)))
        return 1 + float(self.transition[last, goes_on] @ means)

    def probability_of_last(self, last: int, token: int) -> float:
        """Return the probability that `token` is the one before the stop token, after the token `last`."""
        goes_on = np.delete(np.arange(len(self.transition)), self.stop)
        inner = self.transition[np.ix_(goes_on, goes_on)]
        ends = np.where(goes_on == token, self.transition[goes_on, self.stop], 0.0)
        hits = np.linalg.solve(np.eye(len(goes_on)) - inner, ends)
        direct = self.transition[last, self.stop] if last == token else 0.0
        return float(self.transition[last, goes_on] @ hits + direct)
