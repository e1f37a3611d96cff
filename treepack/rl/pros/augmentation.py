"""Augmented queries: a task together with the valuable beginning of a rollout that solved it (PROS, section 3).

    Trie, entropies --augment--> Augmentation(AugmentedQuery, ...)

    prompt | y of a successful rollout: its T trained tokens        entropy[t] is that of the distribution y[t] was
    . . .  | y0 y1 | y2 y3 y4 y5 | y6 y7                            drawn from
                 T/4      ^    3T/4
    prompt   y0 y1 y2 y3                the augmented query: all before the token of highest entropy in [T/4, 3T/4)

A new rollout starts where the old one was least certain, so it costs less and leaves early dead ends out. It trains
what it adds and nothing else: `untrained_prefix`, which the reader of token records obeys, says how long that is. The
pool has two levels: a prefix of a rollout of an augmented query is one of the original query too.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from treepack.columns import SpanView
from treepack.errors import TreepackError
from treepack.ingest.readers.fields import UNTRAINED_PREFIX, marked
from treepack.rl.pros.signals import PerToken
from treepack.trajectory import Float64, Int32, Int64, positions
from treepack.trie.trie import Trie, sequences_of

BOUNDARIES = ("token", "turn")
TOP_VALUES = 0.1


@dataclass(frozen=True, slots=True)
class AugmentedQuery:
    """The prompt for new rollouts: that of the original query and `num_reused` tokens of a rollout after it.

    `parent_group` is the original query, `parent_trajectory` the rollout. `query_id` is made of the original query and
    the tokens, so the same prefix has the same id in every training step.
    """

    query_id: str
    parent_group: str
    parent_trajectory: str
    prompt_token_ids: Int32
    num_reused: int

    def record(self, text: str | None = None) -> dict[str, Any]:
        """As one line of JSON; names of rollouts made of it, if they are passed on, are those that readers know."""
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
class Augmentation:
    """Augmented queries in the order of their rollouts in the trie, and what became of the rollouts that gave none."""

    queries: list[AugmentedQuery]
    counts: Counter[str]


@dataclass(frozen=True, slots=True)
class Marks:
    """What a rollout of an augmented query tells of it; see `AugmentedQuery.record`."""

    query_id: str
    parent_group: str
    num_reused: int
    untrained_prefix: int


def valuable_prefix(entropy: Float64, *, value: Float64 | None = None, allowed: NDArray[np.bool_] | None = None) -> int:
    """How many tokens of a rollout's own to keep: t* = argmax of `entropy` [T] over T/4 <= t < 3T/4; -1 if none.

    PROS, section 3. `value` [T] are the critic's values of the states in which the tokens were drawn: only those among
    the highest tenth of the window are looked at, at least one, and all that equal the lowest of them. `allowed` [T]
    are the places where a cut may be. Of equal entropies the first is taken.
    """
    length = len(entropy)
    window = np.arange(-(-length // 4), -(-3 * length // 4))
    if allowed is not None:
        window = window[allowed[window]]
    if len(window) == 0:
        return -1
    if value is not None:
        kept = math.ceil(TOP_VALUES * len(window))
        window = window[value[window] >= np.partition(value[window], -kept)[-kept]]
    return int(window[entropy[window].argmax()])


def augment(
    trie: Trie,
    entropies: PerToken,
    *,
    values: PerToken | None = None,
    boundary: str = "token",
    success_above: float = 0.0,
) -> Augmentation:
    """The augmented query of every rollout with a reward above `success_above`, each prefix of a query once.

    `entropies[i]` and `values[i]` are those of the trained tokens of trajectory i, in order, or None. Entropies of a
    rollout that was packed with its end cut off are those of its first trained tokens: it is used if they reach to
    three quarters of all, and counted if not. `boundary` "turn" cuts only where a run of trained tokens begins.

    Raises:
        TreepackError: an unknown boundary, or a successful rollout without entropies or values, or with others than
            its trained tokens need.
    """
    if boundary not in BOUNDARIES:
        raise TreepackError(f"boundary is {boundary!r}; expected {' or '.join(BOUNDARIES)}")
    if not math.isfinite(success_above):
        raise TreepackError(f"success_above is {success_above}; expected a finite reward")
    counts: Counter[str] = Counter()
    queries: dict[str, AugmentedQuery] = {}
    for found, trained in _successful(trie, counts, success_above):
        name = found.name
        entropy = _checked(entropies[found.index], len(trained), f"{name}: entropies", cut_off=True)
        value = None if values is None else _checked(values[found.index], len(trained), f"{name}: values")
        if 4 * len(entropy) < 3 * len(trained):
            counts["cut off in the packed rows, before three quarters of their tokens"] += 1
            continue
        entropy = np.pad(entropy, (0, len(trained) - len(entropy)))  # past the window, where none is looked at
        allowed = np.diff(trained, prepend=-1) > 1 if boundary == "turn" else None
        cut = valuable_prefix(entropy, value=value, allowed=allowed)
        if cut < 0:
            counts["without a turn that starts in the window" if len(trained) > 1 else "of a single token"] += 1
            continue
        query = _query(found, found.tokens[: trained[cut]], first=int(trained[0]))
        if queries.setdefault(query.query_id, query) is query:
            counts["cut"] += 1
        else:
            counts["with the prefix of another"] += 1
    return Augmentation(list(queries.values()), counts)


@dataclass(frozen=True, slots=True)
class _SourceRollout:
    index: int
    name: str
    group: str
    tokens: Int32
    marks: Marks | None


def _successful(trie: Trie, counts: Counter[str], success_above: float) -> Iterator[tuple[_SourceRollout, Int64]]:
    """Rollouts whose reward is high enough, with the positions of their trained tokens."""
    table: pa.Table = trie.trajectories
    spans, marks = SpanView.of(table), marks_of(trie)
    names, groups = table["trajectory_id"].to_pylist(), table["group_id"].to_pylist()
    rewards = table["reward"].to_numpy()
    for i, tokens in enumerate(sequences_of(trie)):
        if not np.isfinite(rewards[i]):
            counts["without a reward"] += 1
        elif rewards[i] <= success_above:
            counts["not successful"] += 1
        else:
            starts, ends, _ = spans[i]
            yield _SourceRollout(i, names[i], groups[i], tokens, marks.get(i)), positions(starts, ends)


def _checked(values: Float64 | None, length: int, what: str, *, cut_off: bool = False) -> Float64:
    if values is None:
        raise TreepackError(
            f"{what} are missing; run treepack logprobs --entropies on its packed rows and give them with --packed, "
            "or name it in a file of --signals"
        )
    if len(values) != length and not (cut_off and len(values) < length):
        raise TreepackError(f"{what} are {len(values)} numbers; expected {length}, one per trained token")
    if not np.isfinite(values).all():
        raise TreepackError(f"{what} hold {values[~np.isfinite(values)][0]}; expected finite numbers")
    return values


def _query(found: _SourceRollout, prompt: Int32, *, first: int) -> AugmentedQuery:
    marks = found.marks
    parent = found.group if marks is None else marks.parent_group
    original = first if marks is None else marks.untrained_prefix - marks.num_reused
    digest = hashlib.sha256(prompt.astype("<i4").tobytes()).hexdigest()[:16]
    return AugmentedQuery(f"{parent}~{digest}", parent, found.name, prompt.copy(), len(prompt) - original)


def marks_of(trie: Trie) -> dict[int, Marks]:
    """The marks of the rollouts of augmented queries, by the index of the trajectory.

    Raises:
        TreepackError: marks are incomplete or impossible, or a reused token is trained.
    """
    table: pa.Table = trie.trajectories
    some = np.flatnonzero(pc.match_substring(table["metadata"], f'"{UNTRAINED_PREFIX}"').to_numpy())
    rows = table.select(["metadata", "source"]).take(pa.array(some)).to_pylist()
    spans, lengths, found = SpanView.of(table), trie.lengths, {}
    for i, row in zip(some.tolist(), rows, strict=True):
        fields = orjson.loads(row["metadata"])
        kinds = {"query_id": str, "parent_group": str, "num_reused": int, UNTRAINED_PREFIX: int}
        given = {name: marked(fields, name) for name in kinds}
        if given[UNTRAINED_PREFIX] is None:  # a word of some other text
            continue
        wrong = [name for name, kind in kinds.items() if type(given[name]) is not kind]
        if wrong or not 0 <= given["num_reused"] <= given[UNTRAINED_PREFIX] <= lengths[i]:
            raise TreepackError(
                f"{row['source']}: {wrong[0] if wrong else 'num_reused'} of an augmented query is missing or wrong; "
                "pass its fields on as treepack augment wrote them"
            )
        if (spans[i][0] < given[UNTRAINED_PREFIX]).any():
            raise TreepackError(f"{row['source']}: a reused token is trained; build the trie again")
        found[i] = Marks(**given)
    return found
