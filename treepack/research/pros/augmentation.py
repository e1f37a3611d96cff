"""Augmented queries: a task together with the valuable beginning of a rollout that solved it (PROS, section 3).

    Trie, entropies --augment--> AugmentedQueries(AugmentedQuery, ...)

    prompt | y of a successful rollout: its T trained tokens        entropy[t] belongs to the distribution from which
    . . .  | y0 y1 | y2 y3 y4 y5 | y6 y7                            y[t] was drawn
                 T/4      ^    3T/4
    prompt   y0 y1 y2 y3                the augmented query: all before the token of highest entropy in [T/4, 3T/4)

A new rollout starts at the token of highest entropy of the old one, so it costs less and avoids early dead ends. It
trains only its own tokens: the field `untrained_prefix` is the number of tokens before them, and the reader of token
records trains none of these. The pool of queries has two levels. If the rollout itself started at an augmented query,
its prefix becomes a query derived from the original one.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from treepack.errors import TreepackError
from treepack.files.metadata import parse_metadata
from treepack.ingest.readers.fields.rollout_facts import UNTRAINED_PREFIX, marked
from treepack.research.pros.signals import PerToken
from treepack.rl.rollouts import rollouts_of
from treepack.sequences import SpanView
from treepack.trajectory import Float64, Int32, Int64, positions
from treepack.trie.trie import Trie, sequences_of

_BOUNDARIES = ("token", "turn")
_TOP_VALUE_SHARE = 0.1  # of the window, by a critic's value: the paper's highest tenth


@dataclass(frozen=True, slots=True)
class AugmentedQuery:
    """The prompt for new rollouts: the prompt of the original query, and then `num_reused` tokens of a rollout.

    `parent_group` is the original query, `parent_trajectory` the rollout. `query_id` depends on the original query and
    the tokens only, so the same prefix has the same id in every training step.
    """

    query_id: str
    parent_group: str
    parent_trajectory: str
    prompt_token_ids: Int32
    num_reused: int

    def record(self, text: str | None = None) -> dict[str, Any]:
        """Return the fields of its JSON line; `text` is the decoded prompt.

        A rollout system that copies these fields to its rollouts uses names that the readers accept.
        """
        return {
            "query_id": self.query_id,
            "group_id": self.query_id,
            "parent_group": self.parent_group,
            "parent_trajectory": self.parent_trajectory,
            "num_reused": self.num_reused,
            UNTRAINED_PREFIX: len(self.prompt_token_ids),
            "prompt_token_ids": self.prompt_token_ids.tolist(),
            "text": text,
        }


@dataclass(frozen=True, slots=True)
class AugmentedQueries:
    """Augmented queries in the order of their rollouts in the trie, and the number of rollouts by outcome."""

    queries: list[AugmentedQuery]
    counts: Counter[str]


@dataclass(frozen=True, slots=True)
class _QueryMarks:
    """Fields of a rollout that identify its augmented query; see `AugmentedQuery.record`."""

    query_id: str
    parent_group: str
    num_reused: int
    untrained_prefix: int


def valuable_prefix(entropy: Float64, *, value: Float64 | None = None, allowed: NDArray[np.bool_] | None = None) -> int:
    """Number of trained tokens to keep: t* = argmax of `entropy` [T] over T/4 <= t < 3T/4, or -1.

    PROS, section 3. `value` [T] are the critic's values of the states in which the tokens were drawn. If they are
    given, only the tokens in the highest tenth of the window by value are considered: at least one, and all that equal
    the lowest of them. `allowed` [T] marks the tokens before which a cut is possible. Of equal entropies the first
    wins.
    """
    # entropy [2.0, 0.1, 0.3, 0.9, 1.4, 0.2, 1.8, 0.1] -> window 2 .. 5, result 4. With the values 0.2, 0.7, 0.4, 0.5 in
    # the window, a tenth of four is one token, and the result is 3.
    length = len(entropy)
    # ceil(T/4) to ceil(3T/4) - 1, in integers.
    window = np.arange(-(-length // 4), -(-3 * length // 4))
    if allowed is not None:
        window = window[allowed[window]]
    if len(window) == 0:
        return -1
    if value is not None:
        num_top = math.ceil(_TOP_VALUE_SHARE * len(window))
        window = window[value[window] >= np.partition(value[window], -num_top)[-num_top]]
    return int(window[entropy[window].argmax()])


def augment(
    trie: Trie,
    entropies: PerToken,
    *,
    values: PerToken | None = None,
    boundary: str = "token",
    success_above: float = 0.0,
) -> AugmentedQueries:
    """Build the augmented query of every rollout with a reward above `success_above`, each prefix of a query once.

    `entropies[i]` and `values[i]` belong to the trained tokens of trajectory i, in order, or are None. A rollout that
    was truncated in the packed rows has entropies of its first trained tokens only. It is used if they are at least
    three quarters of all, and otherwise counted. `boundary` "turn" cuts only before a run of trained tokens.

    Raises:
        TreepackError: an unknown boundary, or a successful rollout whose entropies or values are missing, not finite,
            or their number differs from its trained tokens.
    """
    if boundary not in _BOUNDARIES:
        raise TreepackError(f"boundary is {boundary!r}; expected {' or '.join(_BOUNDARIES)}")
    if not math.isfinite(success_above):
        raise TreepackError(f"success_above is {success_above}; expected a finite reward")
    counts: Counter[str] = Counter()
    queries: dict[str, AugmentedQuery] = {}
    for rollout, trained in _successful_rollouts(trie, counts, success_above):
        name = rollout.name
        entropy = _check_numbers(entropies[rollout.index], len(trained), f"{name}: entropies", may_be_truncated=True)
        value = None if values is None else _check_numbers(values[rollout.index], len(trained), f"{name}: values")
        if 4 * len(entropy) < 3 * len(trained):
            counts["cut off in the packed rows, before three quarters of their tokens"] += 1
            continue
        entropy = np.pad(entropy, (0, len(trained) - len(entropy)))  # zeros after the window, which are never read
        # A turn starts where positions jump: trained [3, 4, 7, 8] -> allowed [True, False, True, False].
        allowed = np.diff(trained, prepend=-1) > 1 if boundary == "turn" else None
        cut = valuable_prefix(entropy, value=value, allowed=allowed)
        if cut < 0:
            counts["without a turn that starts in the window" if len(trained) > 1 else "of a single token"] += 1
            continue
        query = _query(rollout, rollout.tokens[: trained[cut]], first=int(trained[0]))
        if queries.setdefault(query.query_id, query) is query:
            counts["cut"] += 1
        else:
            counts["with the prefix of another"] += 1
    return AugmentedQueries(list(queries.values()), counts)


@dataclass(frozen=True, slots=True)
class _SourceRollout:
    index: int
    name: str
    group: str
    tokens: Int32
    marks: _QueryMarks | None


def _successful_rollouts(
    trie: Trie, counts: Counter[str], success_above: float
) -> Iterator[tuple[_SourceRollout, Int64]]:
    """Yield the rollouts whose reward is high enough, with the positions of their trained tokens; count the others."""
    table: pa.Table = trie.trajectories
    spans, marks = SpanView.of(table), marks_of(trie)
    names, groups = table["trajectory_id"].to_pylist(), table["group_id"].to_pylist()
    rewards = table["reward"].to_numpy()
    rollouts = rollouts_of(trie)
    num_samples = np.bincount(rollouts.of_trajectory)[rollouts.of_trajectory]
    is_first = rollouts.first[rollouts.of_trajectory] == np.arange(trie.num_trajectories)
    for i, tokens in enumerate(sequences_of(trie)):
        if not is_first[i]:
            continue
        if not np.isfinite(rewards[i]):
            counts["without a reward"] += 1
        elif rewards[i] <= success_above:
            counts["not successful"] += 1
        elif num_samples[i] > 1:  # its tokens are several sequences, and none of them is the rollout
            counts["of several trajectories"] += 1
        else:
            starts, ends, _ = spans[i]
            yield _SourceRollout(i, names[i], groups[i], tokens, marks.get(i)), positions(starts, ends)


def _check_numbers(values: Float64 | None, length: int, what: str, *, may_be_truncated: bool = False) -> Float64:
    if values is None:
        raise TreepackError(
            f"{what} are missing; run treepack logprobs --entropies on its packed rows and give them with --packed, "
            "or add the rollout to the file of --signals"
        )
    if len(values) != length and not (may_be_truncated and len(values) < length):
        raise TreepackError(f"{what} are {len(values)} numbers; expected {length}, one per trained token")
    if not np.isfinite(values).all():
        raise TreepackError(f"{what} contain {values[~np.isfinite(values)][0]}; expected finite numbers")
    return values


def _query(rollout: _SourceRollout, prompt: Int32, *, first: int) -> AugmentedQuery:
    """Build the query that `prompt` starts; `first` is the first trained token of the rollout."""
    # Two levels only: the parent of a rollout of an augmented query is the original query, and so is the length of the
    # original prompt: untrained_prefix 9 with num_reused 4 -> 5.
    marks = rollout.marks
    parent = rollout.group if marks is None else marks.parent_group
    original = first if marks is None else marks.untrained_prefix - marks.num_reused
    # Little-endian int32 on every machine, so that ids are portable; 16 hex digits are 64 bits.
    digest = hashlib.sha256(prompt.astype("<i4").tobytes()).hexdigest()[:16]
    return AugmentedQuery(f"{parent}~{digest}", parent, rollout.name, prompt.copy(), len(prompt) - original)


def marks_of(trie: Trie) -> dict[int, _QueryMarks]:
    """Return the marks of the rollouts of augmented queries, by the index of the trajectory.

    Raises:
        TreepackError: marks are incomplete or impossible, or a reused token is trained.
    """
    table: pa.Table = trie.trajectories
    # A search for the name is far cheaper than parsing all metadata.
    indices = np.flatnonzero(pc.match_substring(table["metadata"], f'"{UNTRAINED_PREFIX}"').to_numpy())
    rows = table.select(["metadata", "source"]).take(pa.array(indices)).to_pylist()
    spans, lengths, marks = SpanView.of(table), trie.lengths, {}
    for i, row in zip(indices.tolist(), rows, strict=True):
        fields = parse_metadata(row["metadata"], row["source"])
        kinds = {"query_id": str, "parent_group": str, "num_reused": int, UNTRAINED_PREFIX: int}
        values = {name: marked(fields, name) for name in kinds}
        if values[UNTRAINED_PREFIX] is None:  # the word occurs in some other text
            continue
        wrong = [name for name, kind in kinds.items() if type(values[name]) is not kind]
        if wrong or not 0 <= values["num_reused"] <= values[UNTRAINED_PREFIX] <= lengths[i]:
            raise TreepackError(
                f"{row['source']}: {wrong[0] if wrong else 'num_reused'} of an augmented query is missing or wrong; "
                "copy the fields of its treepack augment line unchanged"
            )
        if (spans[i][0] < values[UNTRAINED_PREFIX]).any():
            raise TreepackError(f"{row['source']}: a reused token is trained; build the trie again")
        marks[i] = _QueryMarks(**values)
    return marks
