"""The names of figures: the key of a figure in JSON is its name in every output, and its label explains it.

`GLOSSARY` is the only place with labels; the commands print them beside the values, and the report uses them.
"""

from __future__ import annotations

# Baselines of the forecast, by their key.
BASELINES = {
    "append_only": "one append-only sequence per conversation",
    "samples": "each trajectory alone",
    "trajectories": "each trajectory of --expand trajectory alone",
    "turns": "one trajectory per turn",
}

# Reasons why a token is stored, by their key in `sharing` of `stats --json`.
REASONS = {
    "first": "first of their group",
    "sampling": "other tokens sampled",
    "environment": "other observation",
    "next call": "next call of a rollout",
    "longer prompt": "longer prompt",
    "behind": "after a lost prefix",
    "lost": "lost",
}

# Labels of figures; each fits beside a name and a number on a terminal of 80 columns.
GLOSSARY = {
    "num_files": "files read",
    "num_trajectories": "token sequences",
    "num_groups": "prompts or tasks",
    "num_trees": "prefix trees",
    "num_nodes": "nodes of the trees",
    "capacity": "maximum tokens of a row",
    "pairs_budget": "maximum attention score pairs of a row",
    "terms_budget": "maximum loss terms of a row",
    "num_rows": "rows",
    "tokens_trained": "trained tokens of all trajectories",
    "tokens_flat": "N_flat: tokens of all trajectories",
    "tokens_tree": "N_tree: tokens of the tries",
    "tokens_packed": "N_pack: tokens of the rows",
    "por": "POR: 1 - N_tree / N_flat",
    "err": "ERR: 1 - N_pack / N_flat",
    "fill": "N_pack / (rows * capacity)",
    "gap": "tokens above a lower bound, at most",
    "pairs_max_over_mean": "largest row / mean row",
    "group_pairs_max_over_mean": "the same for ranks in step",
    "group_cost_max_over_mean": "the same for the time of the model",
    "method": "of the plan",
    "semantics": "of tokens that several trajectories train",
    "normalize": "of the loss weights",
    "tokens_per_second": "N_flat / seconds",
    "num_pairs": "attention score pairs of the rows",
    "total_weight": "sum of the loss weights",
    "token_ratio": "N_pack / N_flat",
    "lower_bound": "tokens that every packing needs",
    "balance": "rows of a step are a multiple of it",
    "effort": "of the search for a plan",
    "tiles_full": "attention tiles without a mask",
    "tiles_partial": "attention tiles under a mask",
    "tiles_partial_unordered": "the same in the order of the trie",
    "bytes_per_token": "bytes on disk / N_pack",
}
# Shares, which are printed as percentages.
RATIOS = frozenset({"por", "err", "fill", "gap", "token_ratio"})
# Figures that commands print only with --verbose.
INTERNAL = frozenset(
    "num_pairs total_weight token_ratio lower_bound balance effort tiles_full tiles_partial tiles_partial_unordered "
    "bytes_per_token".split()
)


def readable_time(seconds: float) -> str:
    """Return a time in a unit that fits: 4.3 s, 12 min, 3.4 h, 2.1 days."""
    for name, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds:.3g} s" if seconds >= 0.001 else "below 1 ms"
