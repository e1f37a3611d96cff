"""The names of figures: the key of a figure in JSON is its name in every output, and its label explains it.

`GLOSSARY` is the only place with labels; the commands print them beside the values, and the report uses them.
"""

from __future__ import annotations

# Baselines of the forecast, by their key.
BASELINES = {
    "append_only": "one append-only sequence per conversation",
    "samples": "each sample alone",
    "turns": "one sample per turn",
}

# Labels of figures; each fits beside a name and a number on a terminal of 80 columns.
GLOSSARY = {
    "num_files": "files read",
    "num_conversations": "conversations that were rendered",
    "num_rollouts": "rollouts read",
    "num_samples": "samples that they became",
    "num_trajectories": "samples, each one sequence",
    "num_groups": "prompts or tasks",
    "num_trees": "prefix trees",
    "num_nodes": "nodes of the trees",
    "tokens_flat": "N_flat: tokens of all samples",
    "tokens_tree": "N_tree: tokens of the tries",
    "tokens_packed": "N_pack: tokens of the rows",
    "tokens_trained": "trained tokens of all samples",
    "por": "POR: 1 - N_tree / N_flat",
    "err": "ERR: 1 - N_pack / N_flat",
    "token_ratio": "N_pack / N_flat",
    "capacity": "most tokens of a row",
    "num_rows": "rows",
    "fill": "tokens of the rows / rows x capacity",
    "lower_bound": "fewest tokens of any packing",
    "gap": "at most this far above the bound",
    "num_pairs": "attention score pairs",
    "pairs_max_over_mean": "longest row / mean row, in pairs",
    "group_pairs_max_over_mean": "time with waiting ranks / without",
    "tokens_per_second": "N_flat / seconds",
    "tiles_partial": "attention tiles under a mask",
    "tiles_full": "attention tiles without a mask",
    "tiles_partial_unordered": "tiles under a mask, trie order",
    "bytes_per_token": "size on disk / N_pack",
    "total_weight": "sum of the loss weights",
    "max_token_id": "largest token id",
}
