"""The data of a fit of the prefix value predictor, which needs no torch: options, supervised rows and their targets.

    trie, options --read_fit_data--> FitData       unsuitable rewards, prefixes and capacities are refused here

`predictor.fit` loads a model and fits it to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.directory import MANIFEST
from treepack.files.manifest import file_sha256, read_manifest
from treepack.research.predictor.rows import AnchorRow, anchor_prefixes, anchor_rows, draw_nodes, tokens_alone
from treepack.research.trace.targets import anchors, binary_rewards, recursive_targets
from treepack.rl.leaf_weights import leaf_weights
from treepack.train.options import TrainOptions
from treepack.trajectory import Float64
from treepack.trie.store.trie_files import read_trie


@dataclass(frozen=True)
class FitOptions:
    """Options of a fit, with the names of the command line; the defaults of lr and epochs are from TRACE too.

    Raises:
        TreepackError: an invalid value, by the name of the option.
    """

    # The options that `treepack train` has too, of which only `fit.SHARED_OPTIONS` are used.
    train: TrainOptions = field(default_factory=lambda: TrainOptions(lr=3e-5, epochs=2))
    capacity: int = 8192  # maximum tokens of a row
    segment: str = "turn"  # the segments after which prefixes end, see `trace.targets.anchors`
    prefix_share: float = 0.06  # of prefixes among the supervised prompts and prefixes: TRACE, appendix E.6
    freeze: bool = False  # leaves the backbone unchanged and fits only the head

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        if self.capacity < 1:
            raise TreepackError(f"capacity is {self.capacity}; expected at least 1")
        if not 0 <= self.prefix_share <= 1:
            raise TreepackError(f"prefix_share is {self.prefix_share}; expected 0 to 1")


@dataclass(frozen=True)
class FitData:
    """The supervised rows of a trie.

    `target` is float64 [num_inner], by node of the segment tree. `origin` has the entries of values.json about the
    trie.
    """

    trie: Path
    options: FitOptions
    rows: list[AnchorRow]
    target: Float64
    num_prompts: int
    tokens_alone: int
    origin: dict[str, Any]
    notes: tuple[str, ...]


def read_fit_data(trie: str | Path, options: FitOptions) -> FitData:
    """Read the trie, draw prompts and prefixes, and pack them.

    Raises:
        TreepackError: a reward is not 0 or 1, a prefix is longer than the capacity, or the trie is damaged.
    """
    directory = Path(trie)
    manifest, rollouts = read_manifest(directory, schema.TRIE_FORMAT), read_trie(directory)
    reward = binary_rewards(rollouts)
    ends = anchors(rollouts, segment=options.segment)
    prefixes = anchor_prefixes(rollouts, ends)
    # Drawn once for all epochs, so that each node has the same row in every epoch.
    nodes = draw_nodes(prefixes, prefix_share=options.prefix_share, seed=options.train.seed)
    constant = f"every rollout has the reward {reward[0]:g}, so the predictor can learn only this constant"
    return FitData(
        trie=directory,
        options=options,
        rows=anchor_rows(prefixes, nodes, capacity=options.capacity),
        target=recursive_targets(ends.tree, reward, leaf_weights(rollouts))[0],
        num_prompts=prefixes.num_groups,
        tokens_alone=tokens_alone(prefixes, nodes),
        origin={"trie_sha256": file_sha256(directory / MANIFEST), "tokenizer": manifest.get("tokenizer")},
        notes=(constant,) if np.ptp(reward) == 0 else (),
    )
