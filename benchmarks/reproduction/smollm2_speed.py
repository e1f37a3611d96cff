"""Time of the gradients of one step: packed trees beside the same rollouts without shared prefixes.

    trees  rows in which a common prefix is computed once
    flat   rows of the same capacity that contain each rollout as a sequence of its own
    alone  one row for each rollout

All three compute the same gradient. Its distance from that of `alone` is |g - g_alone| / |g_alone| over all parameters;
that of `flat` is rounding alone, because it shares nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from smollm2_arms import accumulate
from torch import Tensor

from treepack import PackOptions, Trie, plan_packing
from treepack.pack.plan.plan import Plan
from treepack.pack.plan.planning import packed_trie
from treepack.pack.plan.problem import RowLimits
from treepack.pack.row import Row
from treepack.pack.rows import pack_rows

LONG = 10.0  # seconds of steps after which a packing is not repeated
TREES, FLAT, ALONE = "trees", "flat", "alone"


def packings(trie: Trie, capacity: int) -> dict[str, list[Row]]:
    """Return the rows of `trie` in each of the three ways."""
    alone = Plan("sequence", RowLimits(capacity), np.arange(trie.num_trajectories))
    return {
        ALONE: list(pack_rows(packed_trie(trie, "sequence"), alone)),
        FLAT: list(plan_packing(trie, PackOptions(capacity=capacity, method="sequence"))),
        TREES: list(plan_packing(trie, PackOptions(capacity=capacity))),
    }


def compare(policy: Any, trie: Trie, *, capacity: int, repeats: int = 3) -> list[dict[str, Any]]:
    """Return a record for each packing: tokens, rows, seconds of the fastest step, and `distance`.

    A packing runs `repeats` steps, or fewer if these take long.
    The gradients of the policy are None afterwards.
    """
    records, reference = [], None
    for name, rows in packings(trie, capacity).items():
        gradient = step_gradient(policy, rows)  # compiles kernels, too
        reference = gradient if reference is None else reference
        distance = float((gradient - reference).norm() / reference.norm())
        del gradient
        times: list[float] = []
        while len(times) < repeats and sum(times) < LONG:
            times.append(step_seconds(policy, rows))
        tokens = sum(row.num_tokens for row in rows)
        records.append(
            {"packing": name, "rows": len(rows), "tokens": tokens, "seconds": min(times), "distance": distance}
        )
    return records


def step_gradient(policy: Any, rows: Sequence[Row]) -> Tensor:
    """Return the gradient of a step over all parameters as one float32 vector."""
    accumulate(policy, rows)
    parts = [weights.grad.flatten().float() for weights in policy.model.parameters() if weights.grad is not None]
    policy.model.zero_grad(set_to_none=True)
    return torch.cat(parts)


def step_seconds(policy: Any, rows: Sequence[Row]) -> float:
    """Return the wall clock of the forward and backward passes of a step."""
    begin = time.perf_counter()
    accumulate(policy, rows)
    if policy.device.type == "cuda":
        torch.cuda.synchronize(policy.device)
    end = time.perf_counter()
    policy.model.zero_grad(set_to_none=True)
    return end - begin
