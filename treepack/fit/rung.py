"""The plan of passes over rows, and the rule by which it gets smaller if memory runs out.

RunPlan --smaller_plan--> RunPlan, ..., None     for training, scores, evaluation, and batches in memory
RunPlan --plan_in_words--> "1 layer recomputed, whole rows, passes of 4,096 tokens, logits of 512 targets"
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from treepack.carry.pieces import ALIGNMENT

SMALLEST_CHUNK = 64
# Tokens of a piece. From the preferred number on, it runs at the full rate of a GPU and computes for longer than the
# copies of a layer's keys and values take.
SMALLEST_PIECE, PREFERRED = 1024, 8192


@dataclass(frozen=True)
class RunPlan:
    """A way to compute rows; the fields of `PLANNED` are options of `TrainOptions`.

    `num_bytes` is the predicted peak on the GPU beside weights, gradients and optimiser, `seconds` the predicted time
    of a token. Passes without gradients recompute no layers. With `whole_weights`, each of several ranks keeps all
    weights and gradients during a step, and with `offload_optimizer` the moments of AdamW are in host memory.
    """

    compile: bool
    checkpoint_layers: int
    offload_checkpoints: bool
    carry: int | None
    pass_tokens: int
    loss_chunk: int
    num_bytes: int = 0
    seconds: float = 0.0
    whole_weights: bool = False
    offload_optimizer: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The fields of `TrainOptions` that are chosen."""
        return {name: getattr(self, name) for name in (*PLANNED, "whole_weights")}


# Options that may be "auto"; none of them changes the result of a run except for rounding.
PLANNED = tuple("compile checkpoint_layers offload_checkpoints offload_optimizer carry pass_tokens loss_chunk".split())


def smaller_plan(
    plan: RunPlan, longest: int, num_layers: int, *, can_carry: bool, tokens: int | None = None
) -> RunPlan | None:
    """Return the plan to try after memory has run out; None if `plan` is the smallest one.

    Sharded weights, then more recomputed layers, then shorter passes, then pieces, then shorter pieces, then smaller
    chunks of logits.

    Args:
        plan: the plan that was too large.
        longest: tokens of the longest row.
        num_layers: layers that can be recomputed, possibly 0.
        can_carry: True if rows can run in pieces.
        tokens: tokens of the pass that failed, None if it had as many as the plan allows.
    """
    if tokens is not None:  # half of 1,000,000 would be the same pass
        plan = replace(plan, pass_tokens=min(plan.pass_tokens, tokens))
    if plan.whole_weights:
        return replace(plan, whole_weights=False)
    left, passed, piece = num_layers - plan.checkpoint_layers, plan.pass_tokens, min(longest, plan.carry or longest)
    if left > 0:
        return replace(plan, checkpoint_layers=plan.checkpoint_layers + -(-left // 2))
    if passed > 1 and passed > piece:
        return replace(plan, pass_tokens=max(1, passed // 2))
    size = smaller_piece(piece)
    if can_carry and size >= SMALLEST_PIECE:
        return replace(plan, carry=size, pass_tokens=min(passed, size))  # a pass is no longer than a piece
    if plan.loss_chunk > SMALLEST_CHUNK:
        return replace(plan, loss_chunk=max(SMALLEST_CHUNK, plan.loss_chunk // 2))
    return None


def smaller_piece(tokens: int) -> int:
    """Return half of the tokens of a piece, a multiple of `ALIGNMENT`: 5000 -> 2432."""
    return tokens // (2 * ALIGNMENT) * ALIGNMENT


def plan_in_words(plan: RunPlan) -> str:
    """Return the plan in words: "1 layer recomputed, whole rows, passes of 4,096 tokens, logits of 512 targets"."""
    count, where = plan.checkpoint_layers, " in host memory" if plan.offload_checkpoints else ""
    layers = [f"{count} layer{'s' if count > 1 else ''} recomputed{where}"] if count else []
    rows = "whole rows" if plan.carry is None else f"pieces of {plan.carry:,} tokens"
    passes = "not joined" if plan.pass_tokens == 1 else f"passes of {plan.pass_tokens:,} tokens"
    whole = ["whole weights on each rank"] if plan.whole_weights else []
    return ", ".join([*whole, *layers, rows, passes, f"logits of {plan.loss_chunk:,} targets"])
