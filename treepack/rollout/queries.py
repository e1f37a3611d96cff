"""Files of prompts, and the tables that other commands write, as queries.

    FILE --read_queries--> QueryFile(kind, [Query, ...])

    kind        recognised by                      a query for each                 its prompt comes from
    prompts     ids, messages or text              record                           the record
    augmented   untrained_prefix                   line of treepack augment         the line
    selected    query_id, pass_rate                line of treepack select          --prompts or --trie
    roots       num_rollouts                       group that has any               --prompts or --trie
    prefixes    num_continuations                  prefix of a rollout, or group    --trie

With an environment a record needs no prompt, because the environment has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson

from treepack.errors import TreepackError
from treepack.files.input_files.record_files import read_records
from treepack.files.input_files.records import Record
from treepack.files.remote.address import AnyPath
from treepack.ingest.readers.fields import token_fields as tf
from treepack.ingest.readers.fields.rollout_facts import GROUPS, UNTRAINED_PREFIX, group_of
from treepack.ingest.readers.fields.values import as_id, as_integer
from treepack.rollout.prompts import PromptReader
from treepack.rollout.query import Query
from treepack.rollout.recorded import GroupPrompt, group_prompts, prefix_parts, reused_turn
from treepack.trajectory import derived_group
from treepack.trie.store.trie_files import read_trie
from treepack.trie.trie import Trie

PROMPTS, _AUGMENTED, _SELECTED, _ROOTS, PREFIXES = "prompts", "augmented", "selected", "roots", "prefixes"
_COUNTS = {_ROOTS: "num_rollouts", PREFIXES: "num_continuations"}
_NO_IDS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class QuerySources:
    """Everything that queries are made from, besides their own file.

    Attributes:
        prompts: files with the prompts of the groups that a table names, and with the fields of parents.
        trie: trie with the rollouts that a table names.
        reader: turns records into token ids.
        step: training step of rollouts whose records name none.
        has_environment: an environment makes the prompts, so records need none.
    """

    prompts: tuple[AnyPath, ...] = ()
    trie: AnyPath | None = None
    reader: PromptReader = field(default_factory=PromptReader)
    step: int | None = None
    has_environment: bool = False


@dataclass(frozen=True, slots=True)
class QueryFile:
    """The `queries` of a file in its order. `num_unused` rows of a table ask for no rollout and have no query."""

    kind: str
    queries: list[Query]
    num_unused: int


def read_queries(path: str | AnyPath, sources: QuerySources = QuerySources()) -> QueryFile:
    """Read the queries of a file: JSON lines, JSON or Parquet, also compressed.

    Raises:
        TreepackError: a file of an unknown kind, a malformed record, a prompt that no source has, or two records for
            one query.
    """
    records = list(read_records(str(path)))
    kind = _kind(records[0], sources)
    known = _GroupPrompts(sources)
    if kind in _COUNTS:
        counts = [_integer(record, _COUNTS[kind], minimum=0) for record in records]
        used = [(record, count) for record, count in zip(records, counts, strict=True) if count > 0]
        make = _prefix_queries if kind == PREFIXES else _root_queries
        queries, num_unused = make(used, known), len(records) - len(used)
    elif kind == _SELECTED:
        queries, num_unused = _with_parents(_selected_queries(records, known), known), 0
    else:
        queries, num_unused = [_query_of_record(record, sources) for record in records], 0
        queries = _with_parents(queries, known)
    _refuse_duplicates(queries)
    return QueryFile(kind, queries, num_unused)


def _kind(record: Record, sources: QuerySources) -> str:
    value = record.value
    for kind, name in _COUNTS.items():
        if name in value:
            return kind
    has_prompt = any(value.get(name) is not None for name in ("messages", "prompt", *tf.NAMES[tf.PROMPT]))
    if "query_id" in value and "pass_rate" in value and not has_prompt:
        return _SELECTED
    if value.get(UNTRAINED_PREFIX) is not None:
        return _AUGMENTED
    if has_prompt or sources.has_environment or any(value.get(name) is not None for name in tf.NAMES[tf.IDS]):
        return PROMPTS
    raise TreepackError(
        f"{record.source}: has the fields {', '.join(value)[:200]}; expected prompt_token_ids, messages or prompt, or "
        "an output of treepack allocate, augment or select"
    )


class _GroupPrompts:
    """Finds the prompt of a group in the files of prompts or in the trie; each is read when it is first needed."""

    def __init__(self, sources: QuerySources) -> None:
        self.sources = sources
        self._files: dict[str, Query] | None = None
        self._trie: Trie | None = None
        self._groups: dict[str, GroupPrompt] = {}

    @property
    def trie(self) -> Trie | None:
        if self._trie is None and self.sources.trie is not None:
            self._trie = read_trie(self.sources.trie)
        return self._trie

    def files(self) -> dict[str, Query]:
        """Return the queries of the files of prompts, by their group.

        Raises:
            TreepackError: a malformed record, or two records of one group with different prompts.
        """
        if self._files is None:
            # Files of rollouts may be given too: their records have the prompt of the group, each one again.
            self._files = {}
            for path in self.sources.prompts:
                for record in read_records(str(path)):
                    if record.value.get("parent_rollout") is not None:
                        continue  # its prompt is a prefix of its parent rollout
                    query = _query_of_record(record, self.sources, is_rollout=True)
                    first = self._files.setdefault(query.group_id, query)
                    if not np.array_equal(first.prompt, query.prompt):
                        raise TreepackError(
                            f"{query.source}: the group {query.group_id} has another prompt in {first.source}; keep one"
                        )
        return self._files

    def find(self, groups: Iterable[str]) -> dict[str, Query]:
        """Return a query for each of `groups` that a file or the trie has."""
        names = set(groups)
        found = {name: query for name, query in self.files().items() if name in names}
        missing = names - found.keys() - self._groups.keys()
        if missing and self.trie is not None:
            self._groups |= group_prompts(self.trie, str(self.sources.trie), missing)
        for name in names - found.keys():
            if name in self._groups:
                each = self._groups[name]
                found[name] = Query(name, name, each.ids, step=self.sources.step, fields=each.fields)
        return found

    def get(self, record: Record, group: str, found: dict[str, Query]) -> Query:
        """Return the query of `group` for a `record` that names it.

        Raises:
            TreepackError: neither a file nor the trie has it.
        """
        if group in found:
            return found[group]
        if self.sources.has_environment:
            return Query(group, group, _NO_IDS, step=self.sources.step)
        given = [str(path) for path in (*self.sources.prompts, self.sources.trie) if path is not None]
        where = f"{', '.join(given)} has no prompt of it" if given else "no file with its prompt is given"
        raise TreepackError(
            f"{record.source}: names the group {group}, and {where}; give it with --prompts FILE, or with --trie DIR"
        )


def _with_parents(queries: list[Query], known: _GroupPrompts) -> list[Query]:
    """Return `queries`, the augmented ones with the fields of their parents, and with the turns of their prompts.

    Raises:
        TreepackError: an environment must replay turns, and the trie with their rollouts is not given.
    """
    augmented = [query for query in queries if query.untrained_prefix is not None and "parent_group" in query.fields]
    found = known.find(str(query.fields["parent_group"]) for query in augmented)
    # Without an environment, only the start of the response matters, so the reused tokens count as one turn.
    replayed = augmented if known.sources.has_environment else []
    if replayed and known.trie is None:
        raise TreepackError(
            f"{replayed[0].source}: continues a rollout whose turns the environment replays; give the trie that has it "
            "with --trie"
        )
    prefixes = {_parent_prefix(query): query.source for query in replayed}
    parts = {} if known.trie is None else prefix_parts(known.trie, str(known.sources.trie), prefixes)
    changed = {}
    for query in augmented:
        parent = found.get(str(query.fields["parent_group"]))
        # The parent has the fields that rewards read, such as the solution; fields of the query itself have priority.
        fields = query.fields if parent is None else parent.fields | query.fields
        prefix = _parent_prefix(query)
        turns = parts[prefix].turns if prefix in parts else tuple(reused_turn(query.fields, len(query.prompt)))
        changed[query.key] = replace(query, fields=fields, turns=turns)
    return [changed.get(query.key, query) for query in queries]


def _parent_prefix(query: Query) -> tuple[str, int]:
    return str(query.fields.get("parent_trajectory")), len(query.prompt)


def _query_of_record(record: Record, sources: QuerySources, *, is_rollout: bool = False) -> Query:
    """Return the query of a record with a prompt; `is_rollout` allows a response beside it.

    Raises:
        TreepackError: no prompt, or a malformed field.
    """
    value = record.value
    if is_rollout:
        others = {name for kind in (tf.RESPONSE, tf.MASK) for name in tf.NAMES[kind]}
        record = Record(record.source, record.path, {k: v for k, v in value.items() if k not in others})
    prompt = sources.reader.read(record)
    if prompt is None and not sources.has_environment:
        raise TreepackError(f"{record.source}: has no prompt; expected prompt_token_ids, messages or prompt")
    ids = _NO_IDS if prompt is None else prompt.ids
    group = _group(record) or (_hash(value) if prompt is None else prompt.group_id)
    untrained = None
    if value.get(UNTRAINED_PREFIX) is not None:
        untrained = _integer(record, UNTRAINED_PREFIX, minimum=0)
    fields = {name: each for name, each in value.items() if name not in tf.KINDS or isinstance(each, str)}
    return Query(
        key=group,
        group_id=group,
        prompt=ids,
        step=sources.step if is_rollout else _step(record, sources),
        untrained_prefix=untrained,
        fields=fields,
        source=record.source,
    )


def _root_queries(rows: list[tuple[Record, int]], known: _GroupPrompts) -> list[Query]:
    found = known.find(_text(record, "group_id") for record, _ in rows)
    queries = []
    for record, count in rows:
        query = known.get(record, _text(record, "group_id"), found)
        queries.append(replace(query, count=count, source=record.source))
    return queries


def _selected_queries(records: list[Record], known: _GroupPrompts) -> list[Query]:
    names = [_text(record, "query_id") for record in records]
    found = known.find(names)
    queries = [known.get(record, name, found) for record, name in zip(records, names, strict=True)]
    return [replace(query, source=record.source) for record, query in zip(records, queries, strict=True)]


def _prefix_queries(rows: list[tuple[Record, int]], known: _GroupPrompts) -> list[Query]:
    """Return a query for each prefix; a row without a trajectory asks for further rollouts of its group's prompt."""
    if known.trie is None:
        raise TreepackError(f"{rows[0][0].source}: names prefixes of rollouts; give the trie that has them with --trie")
    bare = [record for record, _ in rows if record.value.get("trajectory_id") is None]
    found = known.find(_text(record, "group_id") for record in bare)
    prefixes = {
        (_text(record, "trajectory_id"), _integer(record, "num_tokens", minimum=1)): record.source
        for record, _ in rows
        if record.value.get("trajectory_id") is not None
    }
    parts = prefix_parts(known.trie, str(known.sources.trie), prefixes)
    queries = []
    for record, count in rows:
        group = _text(record, "group_id")
        if record.value.get("trajectory_id") is None:
            query = known.get(record, group, found)
            # Another key than that of the group's first rollouts, so that ids and seeds differ from theirs.
            query = replace(query, key=f"{group}@{len(query.prompt)}", step=_step(record, known.sources))
        else:
            query = _prefix_query(record, parts, known.sources)
        queries.append(replace(query, count=count, source=record.source))
    return queries


def _prefix_query(record: Record, parts: dict[tuple[str, int], Any], sources: QuerySources) -> Query:
    name, size = _text(record, "trajectory_id"), _integer(record, "num_tokens", minimum=1)
    part, group = parts[name, size], _text(record, "group_id")
    if part.group_id != group:
        raise TreepackError(
            f"{record.source}: trajectory {name!r} has the group {part.group_id} in {sources.trie}, not {group}; give "
            "the trie that the table was made from"
        )
    if sources.step is not None and sources.step != part.step:
        raise TreepackError(
            f"{record.source}: the rollout that it continues has the step {part.step}; leave out --step {sources.step}"
        )
    untrained = part.fields.get(UNTRAINED_PREFIX)
    return Query(
        key=f"{name}@{size}",
        group_id=group,
        prompt=part.ids,
        step=part.step,
        untrained_prefix=untrained if type(untrained) is int else None,
        parent_rollout=name,
        turns=part.turns,
        cuts=part.cuts,
        cut_ids=part.cut_ids,
        fields=part.fields,
    )


def _refuse_duplicates(queries: list[Query]) -> None:
    first: dict[str, Query] = {}
    for query in queries:
        if (other := first.setdefault(query.key, query)) is not query:
            raise TreepackError(
                f"{query.source}: is the same query {query.key} as {other.source}; remove one, or give each record its "
                "own group_id"
            )


def _group(record: Record) -> str | None:
    """Return the group that a record names: its query_id, the name of a group, or its id."""
    field = next((name for name in ("query_id", *GROUPS) if record.value.get(name) is not None), None)
    if field is not None:
        return _text(record, field)
    group = group_of(record)  # {"task": {"key": ...}} names one too
    return _text(record, "id") if group is None and record.value.get("id") is not None else group


def _hash(value: dict[str, Any]) -> str:
    return derived_group(orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY, default=str))


def _step(record: Record, sources: QuerySources) -> int | None:
    """Return the step of a record, or that of the options if it has none.

    Raises:
        TreepackError: both are given and differ.
    """
    if record.value.get("step") is None:
        return sources.step
    step = _integer(record, "step", minimum=-(2**63))
    if sources.step not in (None, step):
        raise TreepackError(f"{record.source}: has the step {step}; leave out --step {sources.step}")
    return step


def _text(record: Record, name: str) -> str:
    return str(as_id(record.value.get(name), source=record.source, name=name))


def _integer(record: Record, name: str, *, minimum: int) -> int:
    return as_integer(record.value.get(name), source=record.source, name=name, minimum=minimum)
