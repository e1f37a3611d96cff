"""treepack: train on trees of agent rollouts, computing every shared prefix once, with exact gradients.

    read_trajectories, tokenize            raw files to token sequences          (treepack.ingest)
    trajectories_from_arrays               the same from arrays in memory
    build_trie                             sequences to a forest of prefix tries (treepack.trie)
    plan_packing                           a forest to training rows             (treepack.pack)
    make_batch, row_loss                   rows to tensors and a loss            (treepack.data, treepack.model: torch)
    backward_row, row_scores               gradients and log-probabilities of rows in pieces  (treepack.carry: torch)
    PackedDataset, collate, batch_loss     packed directories for other trainers
    tree_logprobs_like, plan_batch         batches in memory, in the shape of the caller   (treepack.online: torch)
    sample_rollouts, sample_tree           rollouts as trees, from a server or a model  (treepack.rollout)

    build_trie_directory, pack_trie, stats, check, write_report    commands as functions
    build_trie_on, pack_trie_on            two of them on Ray, Spark, Dask        (treepack.cluster)

Importing treepack costs nothing: names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Home of each public name: a module below treepack, and after a colon its name there, if that differs.
_HOME = {
    "TreepackError": "errors",
    "Trajectory": "trajectory",
    "Tokens": "trajectory",
    "read_trajectories": "ingest.readers.registry",
    "tokenize": "ingest.tokenization",
    "Trie": "trie.trie",
    "build_trie": "trie.builders.in_memory",
    "Plan": "pack.plan.plan",
    "plan_rows": "pack.plan.planning",
    "check_plan": "pack.plan.check",
    "Row": "pack.row",
    "pack_rows": "pack.rows",
    "read_trie": "trie.store.trie_files",
    "read_rows": "pack.files",
    "AdvantageOptions": "rl.advantages.estimate",
    "AdvantagesSummary": "rl.advantages.directory",
    "write_advantages": "rl.advantages.directory",
    "estimate_advantages": "rl.advantages.estimate",
    "with_advantages": "rl.advantages.estimate",
    "augment": "research.pros.augmentation",
    "estimate_pass_rates": "research.pros.pass_rates:estimate",
    "PackedDataset": "data.dataset",
    "collate": "model.collation",
    "batch_loss": "model.collation",
    "batch_logprobs": "model.collation",
    "OnlineOptions": "online.options",
    "OnlineBatch": "online.batch",
    "plan_batch": "online.batch",
    "tree_logprobs_like": "online.statistics",
    "batch_statistics": "online.statistics",
    "row_statistics": "online.statistics",
    "tree_attention": "attention",
    "Reach": "attention",
    "first_visible": "attention",
    "register_attention": "attention:register",
    "register_experts": "model.experts.interface",
    "allow_generation": "attention",
    "trajectories_from_arrays": "trajectory",
    "BuildOptions": "ingest.options",
    "PackOptions": "pack.options",
    "StatsOptions": "analysis.options",
    "ReportOptions": "analysis.options",
    "build_trie_directory": "trie.directory",
    "read_to_trie": "trie.directory",
    "ReadLog": "ingest.read_log",
    "TrieSummary": "trie.directory",
    "pack_trie": "pack.directory",
    "PackSummary": "pack.directory",
    "build_trie_on": "cluster.build",
    "pack_trie_on": "cluster.pack",
    "Scheduler": "cluster.scheduler",
    "MapScheduler": "cluster.map_scheduler",
    "trie_slices": "trie.store.slices",
    "read_slice": "trie.store.slices",
    "plan_pieces": "pack.plan.planning",
    "merge_pieces": "pack.plan.planning",
    "concatenate_rows": "pack.row",
    "RayScheduler": "cluster.ray",
    "micro_batches": "pack.micro_batches",
    "plan_packing": "pack.packing",
    "Packing": "pack.packing",
    "stats": "analysis.stats",
    "check": "analysis.check",
    "write_report": "report.write",
    "Progress": "processes",
    "make_batch": "data.batch",
    "write_trie": "trie.store.trie_files",
    "write_packed": "pack.files",
    "Provenance": "files.manifest",
    "load_model": "model.load",
    "LoraOptions": "model.adapter",
    "row_loss": "model.forward",
    "row_logprobs": "model.forward",
    "row_values": "model.forward",
    "row_objective": "model.forward",
    "row_factors": "model.row_factors",
    "choose_objective": "model.objective",
    "objective_loss": "model.objectives",
    "weighted_nll": "model.loss",
    "tree_logprobs": "model.loss",
    "CarryOptions": "carry.backward",
    "backward_row": "carry.backward",
    "row_value": "carry.backward",
    "row_scores": "carry.backward",
    "verify_gradients": "model.verify",
    "in_pieces": "carry.verify",
    "open_scoring": "train.logprobs",
    "scored_rows": "train.logprobs",
    "open_fit": "research.predictor.fit",
    "fit_values": "research.predictor.fit:fit",
    "load_values": "research.predictor.model",
    "predict_values": "research.predictor.model:predict",
    "Engine": "rollout.engine",
    "Environment": "rollout.environment",
    "Query": "rollout.query",
    "QuerySources": "rollout.queries",
    "RolloutOptions": "rollout.run",
    "RolloutSummary": "rollout.summary",
    "Sampling": "rollout.engine",
    "TreeOptions": "rollout.options",
    "connect": "rollout.servers.server",
    "independent_options": "rollout.options:independent",
    "load_engine": "rollout.in_process.local",
    "LocalEngine": "rollout.in_process.local",
    "SingleTurn": "rollout.episode",
    "tree_trajectories": "rollout.records",
    "read_queries": "rollout.queries",
    "sample_rollouts": "rollout.run",
    "sample_tree": "rollout.sampler",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'treepack' has no attribute {name!r}")
    module, _, own_name = _HOME[name].partition(":")
    return getattr(import_module(f"treepack.{module}"), own_name or name)
