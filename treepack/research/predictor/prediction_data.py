"""The data of a prediction, without torch: rows with all prompts and prefixes of a trie, and the table of values.

    trie, segment, capacity --read_prediction_data--> PredictionData      unsuitable tries are refused here
    trie, values of its nodes --prediction_table--> a table in the format of `research.trace.predictions`

`predictor.model` loads a predictor and computes the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.manifest import read_manifest
from treepack.files.manifest_entries import TokenizerEntry
from treepack.research.predictor.rows import AnchorRow, anchor_prefixes, anchor_rows, tokens_alone
from treepack.research.trace.predictions import group_ids
from treepack.research.trace.targets import TurnPrefixes, anchors
from treepack.trajectory import Float64
from treepack.trie.store.trie_files import read_trie
from treepack.trie.trie import Trie


@dataclass(frozen=True)
class PredictionData:
    """A trie, the ends of all of its prompts and prefixes, and the rows that have them.

    `tokens_alone` is the number of tokens if each prefix were encoded alone.
    """

    path: Path
    trie: Trie
    tokenizer: TokenizerEntry | None
    ends: TurnPrefixes
    rows: list[AnchorRow]
    tokens_alone: int

    @property
    def num_prompts(self) -> int:
        """The number of prompts."""
        return self.ends.tree.num_groups

    @property
    def num_prefixes(self) -> int:
        """The number of different prefixes after a turn."""
        return self.ends.tree.num_inner - self.num_prompts

    @property
    def tokens_computed(self) -> int:
        """The number of tokens in the packed rows."""
        return sum(row.row.num_tokens for row in self.rows)


def read_prediction_data(trie: str | Path, *, segment: str, capacity: int) -> PredictionData:
    """Read the trie, and pack all of its prompts and prefixes.

    Raises:
        TreepackError: the trie has several training steps of one group or is damaged, or a prefix is longer than the
            capacity.
    """
    directory = Path(trie)
    manifest, rollouts = read_manifest(directory, schema.TRIE_FORMAT), read_trie(directory)
    ends = anchors(rollouts, segment=segment)
    prefixes = anchor_prefixes(rollouts, ends)
    nodes = np.arange(ends.tree.num_inner)  # groups 0 to num_groups - 1, then prefixes
    names = group_ids(rollouts, ends)
    # A group_id in two training steps is two groups of the trie, and a file of predictions has one value for it.
    if len(set(names)) < len(names):
        raise TreepackError(
            f"{directory}: predictions hold one value per group_id and the trie has several training steps of one; "
            "build a trie of one step"
        )
    rows = anchor_rows(prefixes, nodes, capacity=capacity)
    return PredictionData(directory, rollouts, manifest.get("tokenizer"), ends, rows, tokens_alone(prefixes, nodes))


def prediction_table(trie: Trie, ends: TurnPrefixes, values: Float64) -> pa.Table:
    """Return a table of group_id, trajectory_id, turn and value: each prompt, then each prefix in trie order.

    `values` is float64 [num_inner], by node.
    """
    # Two rollouts a and b of group q that share turn 1:
    #   group_id q q q, trajectory_id null a b, turn null 1 1, value .5 .7 .7
    names, num_groups = group_ids(trie, ends), ends.tree.num_groups
    prefixes = trie.trajectories.select(["group_id", "trajectory_id"]).take(pa.array(ends.trajectory))
    return pa.table(
        {
            "group_id": pa.array(names + prefixes["group_id"].to_pylist(), pa.string()),
            "trajectory_id": pa.array([None] * num_groups + prefixes["trajectory_id"].to_pylist(), pa.string()),
            "turn": pa.array([None] * num_groups + ends.turn.tolist(), pa.int64()),
            "value": np.concatenate([values[:num_groups], values[ends.node]]),
        }
    )
