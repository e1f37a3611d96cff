"""Totals of a plan: N_pack, the effective reuse ratio, the fill of its rows and the gap to a lower bound."""

from __future__ import annotations

from typing import Any

from treepack.pack.plan.plan import Plan, PlanTotals
from treepack.trajectory import Int64
from treepack.trie.trie import Trie


def packed_totals(trie: Trie, plan: Plan, totals: PlanTotals) -> dict[str, Any]:
    """Return the cost of a plan of `trie`, and a lower bound that holds for every plan; see `totals_of_rows`."""
    bound = max(plan.lower_bound, trie.tokens_tree)
    return totals_of_rows(
        totals,
        capacity=plan.capacity,
        multiple_of=plan.multiple_of,
        token_pairs=plan.token_pairs,
        lower_bound=bound,
        tokens_flat=trie.tokens_flat,
    )


def totals_of_rows(
    totals: PlanTotals, *, capacity: int, multiple_of: int, lower_bound: int, tokens_flat: int, token_pairs: int = 0
) -> dict[str, Any]:
    """Return the cost of rows of at most `capacity` tokens, and `lower_bound`, which holds for every plan.

    ERR is 1 - N_pack / N_flat, fill is the tokens over rows times capacity, and gap is N_pack over the bound less 1.
    Several ranks take the rows in order and wait for each other after each; `group_pairs_max_over_mean` is their total
    time over the time if all rows had the same number of score pairs. With `token_pairs`, `group_cost_max_over_mean` is
    the same for score pairs plus `token_pairs` for each token.
    """
    pairs = totals.row_pairs

    def waiting(costs: Int64) -> float:
        # One line per round of the ranks: costs [9, 7, 4, 4] for two ranks -> [[9, 7], [4, 4]], time 9 + 4 over 12.
        return float(costs.reshape(-1, multiple_of).max(axis=1).sum() * multiple_of / costs.sum())

    waits = {"group_pairs_max_over_mean": waiting(pairs)}
    if token_pairs:
        waits["group_cost_max_over_mean"] = waiting(pairs + token_pairs * totals.row_tokens)
    return {
        "capacity": capacity,
        "num_rows": totals.num_rows,
        "tokens_packed": totals.tokens_packed,
        "err": 1 - totals.tokens_packed / tokens_flat,
        "token_ratio": totals.tokens_packed / tokens_flat,
        "fill": totals.tokens_packed / (totals.num_rows * capacity),
        "lower_bound": lower_bound,
        "gap": totals.tokens_packed / lower_bound - 1,
        "pairs_max_over_mean": float(pairs.max() / pairs.mean()),
        **(waits if multiple_of > 1 else {}),
    }
