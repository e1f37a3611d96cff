"""Options of packing: limits of a row, how rows are planned, and what their losses count.

This file imports no numerical library, so that the command line can take its defaults from here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from treepack.costs.limits import MAX_TOKEN_PAIRS
from treepack.errors import TreepackError

METHODS = ("auto", "contiguous", "heuristic", "single-path", "exact", "greedy-online", "sequence", "groups")
EFFORTS = ("low", "normal", "high")
TOO_LONG = ("error", "drop", "truncate")
SEMANTICS = ("branch", "once")
NORMALIZE = ("token", "trajectory", "group")

# The end of the sentences that refuse trajectories longer than the capacity.
ANY_LENGTH = "train --carry auto trains rows of any length, so memory is not a reason to drop or truncate trajectories"

MAX_CAPACITY = 2**31 - 1  # columns count the tokens of a row in 32 bits
MAX_BUDGET = 10**18  # a sum of nine budgets still fits int64


@dataclass(frozen=True, slots=True)
class PackOptions:
    """Options of packing a trie into rows: the options of `treepack pack`.

    Raises:
        TreepackError: a value that an option does not take.
    """

    # Maximum number of tokens in a row. None takes the capacity of a plan file; without one, 16,384 or 65,536 if every
    # trajectory fits, else the next power of two that they fit.
    capacity: int | None = None
    pairs_budget: int | None = None  # maximum number of attention score pairs in a row, None for no limit
    terms_budget: int | None = None  # maximum number of loss terms in a row, None for no limit
    method: str = "auto"  # how trajectories are assigned to rows; docs/packing.md describes the methods
    effort: str = "normal"  # how much work a method that searches may do: "low", "normal" or "high"
    # Maximum seconds per tree for a method that proves its plan optimal, None for no limit.
    time_limit: float | None = None
    balance: int = 1  # every training step gets a multiple of this number of rows, with even costs
    # With `balance`, score pairs that take as long as one token in a model, so that the cost of a row is its time:
    # `costs.model_cost.pairs_of_token`. With 0 it is its score pairs alone.
    token_pairs: int = 0
    # "error" refuses a trajectory longer than the capacity, "drop" leaves it out, "truncate" cuts it. Memory is not a
    # reason to drop or truncate: raise the capacity, and train with `carry`.
    too_long: str = "error"
    semantics: str = "branch"  # a shared trained token counts for every trajectory ("branch") or once ("once")
    normalize: str = "token"  # "token", "trajectory" or "group": which of them have equal weight in the mean loss
    # Multiply trajectory weights by the leaf weights of sampled trees, without leaves of a fallback.
    leaf_weights: bool = False
    fallback_leaves: bool = False  # with `leaf_weights`, keep the leaves of a fallback, with the weights of all leaves
    workers: int = 1  # processes that plan; the plan is the same for any number

    def __post_init__(self) -> None:
        """Refuse values that make no sense, naming the option."""
        choices = {
            "method": METHODS,
            "effort": EFFORTS,
            "too_long": TOO_LONG,
            "semantics": SEMANTICS,
            "normalize": NORMALIZE,
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise TreepackError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(known)}")
        limits = {"capacity": MAX_CAPACITY, "pairs_budget": MAX_BUDGET, "terms_budget": MAX_BUDGET}
        for name, maximum in limits.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= maximum:
                raise TreepackError(f"{name} is {value}; expected 1 to {maximum}")
        for name in ("balance", "workers"):
            if getattr(self, name) < 1:
                raise TreepackError(f"{name} is {getattr(self, name)}; expected at least 1")
        if not 0 <= self.token_pairs <= MAX_TOKEN_PAIRS:
            raise TreepackError(f"token_pairs is {self.token_pairs}; expected 0 to {MAX_TOKEN_PAIRS}")
        if self.token_pairs and self.balance == 1:
            raise TreepackError("the model of a balance was given without a number of ranks; give --balance too")
        if self.time_limit is not None and not (math.isfinite(self.time_limit) and self.time_limit > 0):
            raise TreepackError(f"time_limit is {self.time_limit}; expected a positive number of seconds")
        if self.fallback_leaves and not self.leaf_weights:
            raise TreepackError("fallback_leaves selects among leaf weights; give --leaf-weights too, or neither")
        self.check_method(self.method)

    def check_method(self, method: str) -> None:
        """Refuse `method`, which may come from a plan file instead of these options, if it does not suit the semantics.

        Raises:
            TreepackError: the method shares no token and a shared token would count once.
        """
        if method == "sequence" and self.semantics == "once":
            raise TreepackError("the method sequence shares no token, so semantics must be branch")

    def as_record(self) -> dict[str, Any]:
        """Return the options as the manifest of a packed directory records them; newer ones only if they are used."""
        newer = ("leaf_weights", "fallback_leaves", "token_pairs")
        used = {name: getattr(self, name) for name in newer if getattr(self, name)}
        return used | {
            "method": self.method,
            "effort": self.effort,
            "time_limit": self.time_limit,
            "pairs_budget": self.pairs_budget,
            "terms_budget": self.terms_budget,
            "balance": self.balance,
            "too_long": self.too_long,
            "semantics": self.semantics,
            "normalize": self.normalize,
        }
