"""A log of reading: the numbers of rollouts that were used and skipped, and the names of the first skipped ones.

    part 0 --worker--> batch, log 0  \\
    part 1 --worker--> batch, log 1  --ReadLog.merge, in the order of the parts--> one log

Each worker returns the log of its part. Every field is a sum or the beginning of a list, so the merged log is the same
for any number of workers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Any, TypeVar

import pyarrow as pa

from treepack.errors import TreepackError
from treepack.ingest.readers.fields.values import JsonObject
from treepack.sequences import NO_TRAJECTORY
from treepack.tokenise.control_tokens import TRAINED
from treepack.trajectory import Chat, Outcome, Skipped, Trajectory

T = TypeVar("T")

_MAX_NAMED = 100  # skipped rollouts and groups that a log names; all of them are counted
_UNUSED = re.compile(r"(?:.* )?field '(.*)' not used")  # the note on a field that no reader uses
_NUM_NAMED = 3  # fields that the line about all of them names
# Words of names that a program writes for itself: ids, times, versions, costs, and kinds of entries.
_BOOKKEEPING = frozenset(
    """
    id ids uuid guid index idx object kind type role name status state version schema is at timestamp ts time date
    created updated started ended start end duration latency elapsed tokens token count counts num total cost costs
    spend price stats timing model provider system tier fingerprint signature hash path cwd host user git branch mode
    origin sidechain meta display visible in transcript only archived request service session environment parent leaf
    level depth step max api ms unix nano num
    """.split()
)
PREFIX = "skipped: "  # begins the reasons for skipping among the counts
_RENAMED_NOTE = "id that several trajectories have, followed by @ and the source"
LARGE_SHARE = 0.05  # above this share of skipped rollouts, a summary begins with it


@dataclass(slots=True)
class ReadLog:
    """Counts of one reading.

    Attributes:
        counts: the number of each note, and of each reason for skipping as `skipped: <reason>`.
        num_rollouts: rollouts that became at least one sample.
        num_conversations: the conversations among them, which a chat template renders.
        num_samples: samples of all rollouts: a conversation becomes several if the template rewrites earlier turns.
        num_skipped: rollouts that became no sample. Files and records that are not rollouts are only in `counts`.
        skipped: the first `_MAX_NAMED` skipped rollouts.
        groups: the groups that lost a rollout. A rollout that names no group counts in `num_without_group` instead.
        reasons: the number of skipped rollouts for each reason; unlike `counts`, without files and single turns.
        trained_control: source and note of the first `_MAX_NAMED` rollouts that train a control token of their text.
        totals: sums that other stages add, such as the tokens of a baseline.
        unused: notes on fields that are not used, of the rollouts that became no sample.
    """

    counts: Counter[str] = field(default_factory=Counter)
    num_rollouts: int = 0
    num_conversations: int = 0
    num_samples: int = 0
    num_skipped: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    groups: set[str] = field(default_factory=set)
    num_without_group: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    trained_control: list[tuple[str, str]] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)

    def merge(self, other: ReadLog) -> None:
        """Add the log of the next part."""
        for name in ("counts", "reasons", "totals", "unused"):
            getattr(self, name).update(getattr(other, name))
        for name in ("num_rollouts", "num_conversations", "num_samples", "num_skipped", "num_without_group"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.skipped += other.skipped[: _MAX_NAMED - len(self.skipped)]
        self.trained_control += other.trained_control[: _MAX_NAMED - len(self.trained_control)]
        self.groups |= other.groups

    def add(self, item: Outcome, samples: Iterable[Outcome]) -> Iterator[Trajectory]:
        """Count `item`, as a reader returned it, and yield the usable ones of its `samples`."""
        num_samples = 0
        lost: list[Skipped] = []
        for sample in samples:
            if isinstance(sample, Skipped):
                self.counts[PREFIX + sample.reason] += 1
                lost.append(sample)
            else:
                self.counts.update(sample.notes)
                named = [(sample.source, note) for note in sample.notes if note.endswith(TRAINED)]
                self.trained_control += named[: _MAX_NAMED - len(self.trained_control)]
                self.totals.update(sample.totals)
                num_samples += 1
                yield sample
        self.num_samples += num_samples
        # A path of a search tree has no sample if all of its turns belong to earlier paths.
        if num_samples or not lost:
            self.num_rollouts += 1
            self.num_conversations += isinstance(item, Trajectory) and isinstance(item.content, Chat)
        elif lost and lost[0].is_rollout:  # a rollout of several samples is lost only with the last of them
            self._lose(lost[0])
            if isinstance(item, Trajectory):
                self.unused.update(note for note in item.notes if _UNUSED.fullmatch(note))

    def count_renamed(self, renamed: pa.Table | None) -> None:
        """Count trajectories whose id is not unique."""
        if renamed is not None:
            self.counts[_RENAMED_NOTE] += len(renamed)

    def _lose(self, skipped: Skipped) -> None:
        self.num_skipped += 1
        self.reasons[skipped.reason] += 1
        if len(self.skipped) < _MAX_NAMED:
            self.skipped.append(skipped)
        if skipped.group_id is None:
            self.num_without_group += 1
        else:
            self.groups.add(skipped.group_id)

    def as_record(self) -> JsonObject:
        """Return the log, without what `count_renamed` counted, as JSON values that `of_record` reads."""
        record = {each.name: getattr(self, each.name) for each in fields(self)}
        lists = {"skipped": [asdict(each) for each in self.skipped], "groups": sorted(self.groups)}
        sums = {name: dict(sorted(value.items())) for name, value in record.items() if isinstance(value, Counter)}
        sums["counts"].pop(_RENAMED_NOTE, None)  # a build of more rollouts renames others
        return {**record, **sums, **lists}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> ReadLog:
        """Return the log of `as_record`.

        Raises:
            KeyError, TypeError, ValueError: the record was altered, or written by a different version.
        """
        log = cls(**record)
        log.skipped = [Skipped(**each) for each in record["skipped"]]
        log.groups, log.trained_control = set(record["groups"]), [(a, b) for a, b in record["trained_control"]]
        for name in ("counts", "reasons", "totals", "unused"):
            setattr(log, name, Counter(record[name]))
        return log

    def control_record(self) -> JsonObject | None:
        """Return the rollouts that train control tokens of their text as a manifest records them, or None."""
        if not self.trained_control:
            return None
        number = sum(count for note, count in self.counts.items() if note.endswith(TRAINED))
        return {
            "num_rollouts": number,
            "rollouts": [{"source": source, "note": note} for source, note in self.trained_control],
        }

    def skipped_record(self, groups: Iterable[str]) -> JsonObject | None:
        """Return the skipped rollouts as the manifest of a trie records them, or None if none was skipped.

        `groups` are the groups of the trie: a group that lost a rollout and is not among them lost all of its rollouts.
        """
        if not self.num_skipped:
            return None
        # The largest count; of equal ones the first by name, so that the order of reading does not matter.
        main_reason, num_main_reason = min(self.reasons.items(), key=lambda item: (-item[1], item[0]))
        reduced = self.groups.intersection(groups)
        return {
            "num_rollouts": self.num_rollouts,
            "num_skipped": self.num_skipped,
            "main_reason": main_reason,
            "num_main_reason": num_main_reason,
            "rollouts": [{"source": each.source, "reason": each.sentence} for each in self.skipped],
            "num_groups": len(self.groups),
            "num_groups_lost": len(self.groups) - len(reduced),
            "num_without_group": self.num_without_group,
            "groups": sorted(reduced)[:_MAX_NAMED],
        }


def without_unused(counts: Mapping[str, int]) -> tuple[dict[str, int], str]:
    """Return `counts` without the notes on fields that are not used, and one line about these notes, or "".

    Bookkeeping of a program, such as `message.usage.input_tokens` and `gitBranch`, is no news.
    """
    names = {note: match[1] for note in counts if (match := _UNUSED.fullmatch(note))}
    news = [name for note, name in names.items() if not (note.startswith("field") and _is_bookkeeping(name))]
    rest = {note: count for note, count in counts.items() if note not in names}
    if not news:
        return rest, ""
    more = f", ... ({len(news):,} in total, listed by treepack formats --record FILE)"
    listed = ", ".join(news[:_NUM_NAMED]) + more * (len(news) > _NUM_NAMED)
    return rest, f"fields not used: {listed}"


def _is_bookkeeping(path: str) -> bool:
    # "message.isSidechain" -> [{message}, {is, sidechain}]
    words = [{each.lower() for each in re.findall("[A-Z]?[a-z]+", name)} for name in path.split(".")]
    return words[-1] <= _BOOKKEEPING or any({"usage", "metrics"} & each for each in words)


class NoTrajectoryError(TreepackError):
    """The input has no trajectory."""


def refuse_nothing(
    items: Iterable[T],
    counts: Mapping[str, int],
    skipped: Sequence[Skipped] = (),
    unused: Mapping[str, int] = MappingProxyType({}),
) -> Iterator[T]:
    """Yield `items`; if there is none, refuse the input with the `counts` of reasons for skipping and an example.

    The error names fields that are not used, of the notes `unused`, because they may contain the answers.

    Raises:
        NoTrajectoryError: there is no item.
    """
    is_empty = True
    for item in items:
        is_empty = False
        yield item
    if not is_empty:
        return
    reasons = {name.removeprefix(PREFIX): count for name, count in counts.items() if name.startswith(PREFIX)}
    most_frequent = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    listed = ", ".join(f"{reason} ({count:,})" for reason, count in most_frequent)
    example = next((each.detail for each in skipped if each.detail), "")
    parts = {"the first: ": example, "skipped: ": listed, "": without_unused(unused)[1]}
    raise NoTrajectoryError("; ".join([NO_TRAJECTORY, *(name + part for name, part in parts.items() if part)]))
