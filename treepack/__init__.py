"""treepack: train on trees of agent rollouts, computing every shared prefix once, with exact gradients.

    read_trajectories, tokenize   raw files to token sequences          (treepack.readers, treepack.tokenization)
    build_trie                    sequences to a forest of prefix tries (treepack.trie)
    plan_rows, pack_rows          a forest to training rows             (treepack.plan, treepack.pack)
    PackedDataset, row_loss       rows to tensors and a loss            (treepack.dataset, treepack.model; need torch)
    collate, batch_loss           the same for other trainers           (treepack.collation)

Importing treepack costs nothing: names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "TreepackError": "errors",
    "Trajectory": "trajectory",
    "Tokens": "trajectory",
    "read_trajectories": "readers",
    "tokenize": "tokenization",
    "Trie": "trie",
    "build_trie": "trie",
    "Plan": "plan",
    "plan_rows": "plan",
    "check_plan": "plan",
    "Row": "pack",
    "pack_rows": "pack",
    "read_trie": "shards",
    "read_rows": "shards",
    "AdvantageOptions": "rl.advantages",
    "estimate_advantages": "rl.advantages",
    "with_advantages": "rl.advantages",
    "augment": "rl.augmentation",
    "estimate_pass_rates": "rl.pass_rates:estimate",
    "PackedDataset": "dataset",
    "collate": "collation",
    "batch_loss": "collation",
    "batch_logprobs": "collation",
    "tree_attention": "attention",
    "register_attention": "attention:register",
    "load_model": "model",
    "row_loss": "model",
    "row_logprobs": "model",
    "row_objective": "model",
    "choose_objective": "objectives",
    "objective_loss": "objectives",
    "weighted_nll": "loss",
    "tree_logprobs": "loss",
    "verify_gradients": "verify",
    "open_scoring": "logprobs",
    "scored_rows": "logprobs",
    "open_fit": "values",
    "fit_values": "values:fit",
    "load_values": "value_model",
    "predict_values": "value_model:predict",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'treepack' has no attribute {name!r}")
    module, _, own_name = _HOME[name].partition(":")
    return getattr(import_module(f"treepack.{module}"), own_name or name)
