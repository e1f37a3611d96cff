"""Share of prefixes with mixed outcomes, and how well predictions rank them: statistics of a trie (TRACE).

trie --contrast_entries--> {"effective_ratio": ..., "spearman": ...}

`analysis.stats` takes it as an argument, because the core imports no method of a single paper.
"""

from __future__ import annotations

from typing import Any

from treepack.files.remote.address import AnyPath
from treepack.research.trace.predictions import correlations, read_predictions
from treepack.research.trace.targets import anchors, binary_rewards, effective_ratios
from treepack.rl.leaf_weights import leaf_weights
from treepack.trie.trie import Trie


def contrast_entries(trie: Trie, *, predictions: AnyPath | None = None, segment: str = "turn") -> dict[str, Any]:
    """Return the share of groups and prefixes with both outcomes, and with `predictions` their rank correlation.

    Args:
        trie: rollouts with a reward each.
        predictions: file of predicted values, as for `treepack allocate`.
        segment: end of a prefix: "turn", "recorded", "node" or a number of tokens.

    Raises:
        TreepackError: a reward is missing or has a third value, or the file does not suit the trie.
    """
    reward, prefixes = binary_rewards(trie), anchors(trie, segment=segment)
    ratios = effective_ratios(prefixes, reward, leaf_weights(trie))
    entries: dict[str, Any] = {"effective_ratio": {name: ratio._asdict() for name, ratio in ratios.items()}}
    if predictions:
        levels = correlations(read_predictions(predictions), trie, prefixes, reward)
        entries["spearman"] = {name: level._asdict() for name, level in levels.items()}
    return entries
