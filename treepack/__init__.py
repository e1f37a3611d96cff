"""treepack: train on trees of agent rollouts, computing every shared prefix once, with exact gradients.

    read_to_trie, trajectories_from_arrays, build_trie    rollouts from files or arrays to a forest of prefix tries
    plan_packing                                          a forest to training rows
    load_model, make_batch, row_loss                      rows to tensors and a loss
    tree_logprobs_like, plan_batch, batch_statistics      batches in memory, in the shape of the caller
    build_trie_directory, write_advantages, pack_trie, stats, check, write_report, sample_rollouts    commands
    PackedDataset                                         a packed directory, for other trainers

and the options of these. Everything else is imported from its room, for example `treepack.carry.backward.backward_row`.
Importing treepack costs nothing: names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.3.0"

# Home of each public name: a module below treepack, and after a colon its name there, if that differs.
_HOME = {
    "TreepackError": "errors",
    "Trajectory": "trajectory",
    "Trie": "trie.trie",
    "build_trie": "trie.builders.in_memory",
    "AdvantageOptions": "rl.advantages.advantage_options",
    "write_advantages": "rl.advantages.directory",
    "PackedDataset": "data.dataset",
    "OnlineOptions": "online.options",
    "OnlineBatch": "online.batch",
    "plan_batch": "online.batch",
    "tree_logprobs_like": "online.statistics",
    "batch_statistics": "online.statistics",
    "register_attention": "attention:register",
    "allow_generation": "attention",
    "trajectories_from_arrays": "ingest.array_rollouts",
    "BuildOptions": "ingest.options",
    "PackOptions": "pack.options",
    "StatsOptions": "analysis.options",
    "ReportOptions": "analysis.options",
    "build_trie_directory": "trie.directory",
    "read_to_trie": "trie.directory",
    "pack_trie": "pack.directory",
    "plan_packing": "pack.packing",
    "stats": "analysis.stats",
    "check": "analysis.check",
    "write_report": "report.write",
    "Progress": "processes",
    "make_batch": "data.batch",
    "load_model": "model.load",
    "LoraOptions": "model.adapters.lora_options",
    "row_loss": "model.forward",
    "TreeOptions": "rollout.options",
    "RolloutOptions": "rollout.options",
    "sample_rollouts": "rollout.run",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        near = [] if name.startswith("_") else import_module("difflib").get_close_matches(name, _HOME, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise AttributeError(f"module 'treepack' has no attribute {name!r}{hint}", name=name)
    module, _, own_name = _HOME[name].partition(":")
    try:
        return getattr(import_module(f"treepack.{module}"), own_name or name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from treepack.errors import TreepackError, torch_hint

        raise TreepackError(f"treepack.{name} needs torch, which is not installed; {torch_hint()}") from error


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
