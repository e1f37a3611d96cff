"""A log of reading: the numbers of rollouts that were used and skipped, and the names of the first skipped ones.

    part 0 --worker--> batch, log 0  \\
    part 1 --worker--> batch, log 1  --ReadLog.merge, in the order of the parts--> one log

Each worker returns the log of its part. Every field is a sum or the beginning of a list, so the merged log is the same
for any number of workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from treepack.trajectory import Chat, Skipped, Trajectory

MAX_NAMED = 100  # skipped rollouts and groups that a log names; all of them are counted
LARGE_SHARE = 0.05  # above this share of skipped rollouts, a summary begins with it


@dataclass(slots=True)
class ReadLog:
    """Counts of one reading.

    Attributes:
        counts: the number of each note, and of each reason for skipping as `skipped: <reason>`.
        num_rollouts: rollouts that became at least one sample.
        num_conversations: the conversations among them, which a chat template renders.
        num_samples: samples of all rollouts: a conversation becomes several if the template rewrites earlier turns.
        num_skipped: rollouts that became no sample. Files and records that are no rollouts are only in `counts`.
        skipped: the first `MAX_NAMED` skipped rollouts.
        groups: the groups that lost a rollout and are known by name.
        totals: sums that other stages add, such as the tokens of a baseline.
    """

    counts: Counter[str] = field(default_factory=Counter)
    num_rollouts: int = 0
    num_conversations: int = 0
    num_samples: int = 0
    num_skipped: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    groups: set[str] = field(default_factory=set)
    totals: Counter[str] = field(default_factory=Counter)

    def merge(self, other: ReadLog) -> None:
        """Add the log of the next part."""
        for name in ("counts", "totals"):
            getattr(self, name).update(getattr(other, name))
        for name in ("num_rollouts", "num_conversations", "num_samples", "num_skipped"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.skipped += other.skipped[: MAX_NAMED - len(self.skipped)]
        self.groups |= other.groups

    def add(self, item: Trajectory | Skipped, samples: Iterable[Trajectory | Skipped]) -> Iterator[Trajectory]:
        """Count `item`, as a reader returned it, and yield the usable ones of its `samples`."""
        num_samples = 0
        lost: list[Skipped] = []
        for sample in samples:
            if isinstance(sample, Skipped):
                self.counts[f"skipped: {sample.reason}"] += 1
                lost.append(sample)
            else:
                self.counts.update(sample.notes)
                num_samples += 1
                yield sample
        self.num_samples += num_samples
        if num_samples:
            self.num_rollouts += 1
            self.num_conversations += isinstance(item, Trajectory) and isinstance(item.content, Chat)
        elif lost and lost[0].is_rollout:  # a rollout of several samples is lost only with the last of them
            self._lose(lost[0])

    def _lose(self, skipped: Skipped) -> None:
        self.num_skipped += 1
        if len(self.skipped) < MAX_NAMED:
            self.skipped.append(skipped)
        if skipped.group_id is not None:
            self.groups.add(skipped.group_id)

    @property
    def share_skipped(self) -> float:
        """Share of the rollouts that were skipped, from 0 to 1."""
        return self.num_skipped / max(1, self.num_rollouts + self.num_skipped)

    def as_record(self) -> dict[str, Any]:
        """Return the skipped rollouts as the manifest of a trie records them, empty if there is none."""
        if not self.num_skipped:
            return {}
        return {
            "num_rollouts": self.num_rollouts,
            "num_skipped": self.num_skipped,
            "rollouts": [{"source": each.source, "reason": each.sentence} for each in self.skipped],
            "num_groups": len(self.groups),
            "groups": sorted(self.groups)[:MAX_NAMED],
        }
