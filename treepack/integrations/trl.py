"""TRL's trainers with every shared prefix computed once.

    tree_trainer(GRPOTrainer)   log-probabilities and entropies on rows of siblings             trl_policy
    tree_trainer(RLOOTrainer)   the same
    tree_trainer(DPOTrainer)    the two answers of a pair share their prompt                    trl_pairs
    tree_trainer(SFTTrainer)    rows of a packed directory, with treepack's loss                trl_packed
    TreePlanner                 micro-batches of AsyncGRPOTrainer that share more               trl_planner

The losses of reinforcement learning and of pairs, KL, masks, metrics, generation and vLLM stay TRL's. What a class does
not compute is refused by name when the trainer is made (`trl_checks`).
"""

from __future__ import annotations

from typing import Any, TypeVar

from treepack.errors import TreepackError
from treepack.integrations.trl_packed import packed_trainer
from treepack.integrations.trl_pairs import pair_trainer
from treepack.integrations.trl_planner import TreePlanner
from treepack.integrations.trl_policy import policy_trainer
from treepack.online import OnlineOptions

__all__ = ["TreePlanner", "tree_trainer"]

_Trainer = TypeVar("_Trainer")

_DISTILLATION = frozenset(
    "DistillationTrainer AsyncDistillationTrainer ServerDistillationTrainer GKDTrainer GOLDTrainer IWOPDTrainer "
    "SDFTTrainer SDPOTrainer".split()
)


def __getattr__(name: str) -> Any:
    if name == "CountPlanner":
        raise TreepackError(
            "CountPlanner is gone; put TreePlanner in the place of TokenBudgetBatcher, and train with a token budget"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def tree_trainer(
    base: type[_Trainer], options: OnlineOptions | None = None, *, sequence_ranks: int = 1
) -> type[_Trainer]:
    """Return a subclass of a TRL trainer that computes every shared prefix once.

    The subclass takes the arguments of `base`, except that the datasets of SFTTrainer are `PackedDataset`s. The
    model must be one that `load_model` accepts; the subclass switches it to tree attention.

    Args:
        base: GRPOTrainer, RLOOTrainer, DPOTrainer or SFTTrainer of trl, or a subclass of one.
        options: how rows are planned and computed; not used for SFTTrainer.
        sequence_ranks: neighbouring processes of GRPOTrainer or RLOOTrainer that compute each row together, each a part
            of its tokens; a row then has samples of all of them. Samples, losses and metrics of TRL do not change.

    Raises:
        TreepackError: if `base` is another class, or shares no rows. The subclass raises it for options that treepack
            does not compute.
    """
    given: Any = base
    if not isinstance(given, type):
        kind = type(given).__name__
        named = kind if "Trainer" in kind else "GRPOTrainer"  # somebody may give the model
        raise TreepackError(
            f"tree_trainer: expected a class, and got an object of {kind}; make the trainer with tree_trainer({named})"
        )
    if any(kind.__module__.startswith("treepack.") for kind in base.__mro__):
        raise TreepackError(f"tree_trainer: {base.__name__} shares prefixes already; use it as it is")
    names = {kind.__name__ for kind in base.__mro__}
    if names & _DISTILLATION:  # first, because some are subclasses of SFTTrainer
        raise TreepackError(
            f"tree_trainer: {base.__name__} computes its divergence on padded sequences inside its own forward pass; "
            "write its rollouts and run `treepack train --loss distill --teacher MODEL`, or use it without trees"
        )
    if names & {"GRPOTrainer", "RLOOTrainer"}:
        return policy_trainer(base, options, sequence_ranks=sequence_ranks)
    if sequence_ranks > 1:
        raise TreepackError(
            f"tree_trainer: sequence_ranks shares rows of GRPOTrainer and RLOOTrainer, not of {base.__name__}; set it "
            f"to 1, or run `treepack train --sequence-ranks {sequence_ranks}`"
        )
    if "DPOTrainer" in names:
        return pair_trainer(base, options)
    if "SFTTrainer" in names:
        return packed_trainer(base)
    raise TreepackError(
        f"tree_trainer: {base.__name__} is not supported; expected GRPOTrainer, RLOOTrainer, DPOTrainer or SFTTrainer"
    )
