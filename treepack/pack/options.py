"""Options of packing: limits of a row, how rows are planned, and how much each token counts in the loss.

This file imports no numerical library, so that the command line can take its options from here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from treepack.costs.limits import MAX_TOKEN_PAIRS
from treepack.errors import TreepackError
from treepack.option_fields import check_options, option

METHODS = ("auto", "contiguous", "heuristic", "single-path", "exact", "greedy-online", "sequence", "groups")
EFFORTS = ("low", "normal", "high")
TOO_LONG = ("error", "drop", "truncate")
SEMANTICS = ("branch", "once")
NORMALIZE = ("token", "trajectory", "group")

# The end of the sentences that refuse trajectories longer than the capacity.
ANY_LENGTH = "train runs rows of any length in pieces, so memory is not a reason to drop or truncate trajectories"

MAX_CAPACITY = 2**31 - 1  # columns count the tokens of a row in 32 bits
MAX_BUDGET = 10**18  # a sum of nine budgets still fits int64


@dataclass(frozen=True, slots=True)
class PackOptions:
    """Options of packing a trie into rows: the options of `treepack pack`.

    Raises:
        TreepackError: a value that an option does not take.
    """

    # None takes the capacity of a plan file, if there is one.
    capacity: int | None = option(
        None,
        "Maximum number of tokens in a row, for example 8192 or 8k; default: 16k or 64k if every trajectory fits, "
        "else the next power of two that they fit.",
        minimum=1,
        maximum=MAX_CAPACITY,
    )
    pairs_budget: int | None = option(
        None, "Maximum number of attention score pairs in a row.", minimum=1, maximum=MAX_BUDGET
    )
    terms_budget: int | None = option(
        None,
        "Maximum number of loss terms (trained tokens of single trajectories) in a row.",
        minimum=1,
        maximum=MAX_BUDGET,
    )
    method: str = option(
        "auto",
        "How trajectories are put into rows; groups keeps each group in one row, as dpo needs it.",
        choices=METHODS,
    )
    effort: str = option(
        "normal",
        "How much work a method that searches may do; below high, auto stops within 0.1 % of the bound.",
        choices=EFFORTS,
    )
    time_limit: float | None = option(None, "Maximum time per tree for a method that proves its plan optimal.")
    balance: int = option(
        1,
        "Make the rows of every training step a multiple of this number of ranks, with even score pairs; with "
        "--model even in its time.",
        minimum=1,
    )
    # Not an option of the command, which takes it from its --model.
    token_pairs: int = option(
        0,
        "With --balance: score pairs that take as long as one token of the model, so that the cost of a row is its "
        "time; 0 for score pairs alone.",
        minimum=0,
        maximum=MAX_TOKEN_PAIRS,
    )
    # "error" refuses such a trajectory, "drop" leaves it out, and "truncate" cuts it.
    too_long: str = option(
        "error",
        "How to treat a trajectory longer than the capacity. Memory is no reason to drop or truncate it: raise the "
        "capacity, and train runs long rows in pieces.",
        choices=TOO_LONG,
    )
    semantics: str = option("branch", "A shared trained token counts for every trajectory, or once.", choices=SEMANTICS)
    normalize: str = option(
        "token",
        "Units with equal weight in the mean loss: tokens, trajectories or groups.",
        choices=NORMALIZE,
    )
    leaf_weights: bool = option(
        False,
        "Multiply trajectory weights by the leaf weights of sampled trees, which makes the gradient unbiased, and "
        "leave out the leaves that a fallback added.",
    )
    fallback_leaves: bool = option(
        False, "With --leaf-weights: keep these leaves, with the weights of all leaves, and a part of the bias."
    )
    workers: int = option(1, "Processes that plan; the plan is the same.", minimum=1)

    def __post_init__(self) -> None:
        """Refuse values that make no sense, naming the option."""
        check_options(self)
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
