"""Numbers of conversations and of their samples: an entry of the manifest of a trie and of packed rows.

ReadLog --conversations_of_log--> Conversations --as_record--> entry "conversations"
entry   --conversations_of_manifest--> Conversations

The entry also has the sums over one append-only sequence per rollout, with which a forecast compares. Samples of token
ids and of plain text are append-only by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from treepack.ingest.read_log import ReadLog
from treepack.tokenise import append_only, search_turns

MANIFEST_KEY = "conversations"


@dataclass(frozen=True, slots=True)
class AppendOnly:
    """Sums over append-only sequences: their number, tokens, score pairs and trained tokens (`targets`).

    `num_absent` rollouts have no such sequence, because their template allows none; the longest of their samples, which
    is a lower bound, counts in its place.
    """

    num_sequences: int
    tokens: int
    pairs: int
    targets: int
    num_absent: int


@dataclass(frozen=True, slots=True)
class Conversations:
    """Conversations that a chat template rendered, and their samples.

    Attributes:
        num_conversations: conversations with at least one sample; each path of a search tree is one.
        num_rollouts: these, and rollouts of token ids or plain text.
        num_samples: samples of all of them, and `tokens_flat`, their tokens: the totals of the trie.
        num_turns: trained turns of the conversations: their samples by `--expand turns --per-path`.
        num_parts: their samples by `--expand trajectory`, several for each of the `num_split` conversations in which
            the template rewrites earlier turns.
        num_trees: records that are search trees, and `num_paths`, the conversations in them.
        num_turns_on_paths: turns that several paths have, counted for each path, and `num_merged_turns`, the samples
            that they became.
        append_only: one append-only sequence per rollout.
    """

    num_conversations: int
    num_rollouts: int
    num_samples: int
    tokens_flat: int
    num_turns: int
    num_parts: int
    num_split: int
    num_trees: int
    num_paths: int
    num_turns_on_paths: int
    num_merged_turns: int
    append_only: AppendOnly

    def as_record(self) -> dict[str, Any]:
        """Return the entry of the manifest."""
        return asdict(self)

    def describes(self, totals: Mapping[str, Any]) -> bool:
        """Return whether a trie or rows with these `totals` have all samples that were read, and no others."""
        mine = (self.num_samples, self.tokens_flat)
        return mine == (totals.get("num_trajectories"), totals.get("tokens_flat"))


def conversations_of_log(log: ReadLog, totals: Mapping[str, Any]) -> Conversations | None:
    """Return the conversations of a reading, whose trie has these `totals`; None if no template rendered any."""
    if not log.num_conversations:
        return None
    sums = log.totals
    return Conversations(
        num_conversations=log.num_conversations,
        num_rollouts=log.num_rollouts,
        num_samples=totals["num_trajectories"],
        tokens_flat=totals["tokens_flat"],
        num_turns=sums[append_only.TURNS],
        num_parts=sums[append_only.PARTS],
        num_split=sums[append_only.SPLIT],
        num_trees=sums[search_turns.TREES],
        num_paths=sums[search_turns.PATHS],
        num_turns_on_paths=sums[search_turns.TURNS_ON_PATHS],
        num_merged_turns=sums[search_turns.MERGED_TURNS],
        append_only=AppendOnly(
            num_sequences=sums[append_only.SEQUENCES],
            tokens=sums[append_only.TOKENS],
            pairs=sums[append_only.PAIRS],
            targets=sums[append_only.TARGETS],
            num_absent=sums[append_only.ABSENT],
        ),
    )


def conversations_of_manifest(manifest: Mapping[str, Any]) -> Conversations | None:
    """Return the entry of a manifest whose types were checked, or None if it has none."""
    record = manifest.get(MANIFEST_KEY)
    if record is None:
        return None
    sums = AppendOnly(**{name: record["append_only"][name] for name in AppendOnly.__slots__})
    known = {name: record[name] for name in Conversations.__slots__}
    return Conversations(**known | {"append_only": sums})
