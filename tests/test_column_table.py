"""The table of columns: values of every column pass all stages unchanged, whichever columns the table has."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.paths import ROOT
from support.strategies import make, trajectories
from treepack.columns import COLUMNS, LAWS, OF_TRAJECTORY, Column, Lists, Sharing
from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.manifest import Provenance, read_manifest
from treepack.pack.capacity import fit_capacity
from treepack.pack.check import check_packed
from treepack.pack.files import read_rows, write_packed
from treepack.pack.plan.planning import plan_rows
from treepack.pack.row import Row, RowTerms, concatenate_rows
from treepack.pack.rows import pack_rows
from treepack.ragged import RaggedArray
from treepack.sequences import as_columns
from treepack.trajectory import Tokens, Trajectory, positions
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.builders.out_of_core import build_large_trie
from treepack.trie.check import check_trie
from treepack.trie.store.trie_files import read_trie, write_trie
from treepack.trie.trie import trajectories_of

STORED = tuple(column for column in COLUMNS if column.stored is not None)
# Entries by trajectory, position of the token, and column; a missing entry is absent.
Entries = dict[tuple[str, int, str], Any]
TRIE_COLUMNS = {name for column in STORED for name in column.sources}


def names_of(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]


def test_typed_fields_are_the_columns_of_the_table() -> None:
    torch = pytest.importorskip("torch")
    from treepack.data.batch import PER_SCORED, PER_TERM, TermTensors

    assert [name for name in names_of(RowTerms) if name not in ("token", "trajectory", "weight")] == [
        column.name for column in (*COLUMNS, *OF_TRAJECTORY)
    ]
    structure = {"tokens", "starts", "ends", "span_weights", "routes"}
    assert set(names_of(Tokens)) - structure == {column.name for column in STORED}
    assert {*PER_TERM, *PER_SCORED} <= set(names_of(TermTensors))
    in_batches = {column.name for column in (*COLUMNS, *OF_TRAJECTORY) if column.is_in_batches}
    assert set(names_of(TermTensors)) == {"tokens", "index", "trajectory", "weight", "group", "position", "teacher"} | (
        in_batches
    )
    assert torch is not None


def value_of(column: Column, trained: list[int], sizes: list[int], rng: np.random.Generator) -> Any:
    """Made-up entries of a column for the trained tokens: lists have the given sizes, and their own token."""
    if isinstance(column.kind, Lists):
        if np.issubdtype(column.kind.dtype, np.integer):
            lists = [
                sorted({token, *range(token + 1, token + size)})[:size]
                for token, size in zip(trained, sizes, strict=True)
            ]
        else:
            lists = [rng.random(size).tolist() for size in sizes]
        return RaggedArray.of(lists, column.kind.dtype)
    # Few distinct laws, so that a token has several terms of one law and of several.
    values = rng.choice([0.5, 0.75], len(trained)) if column.sharing is Sharing.LAW else rng.random(len(trained))
    return values.astype(column.kind.dtype)


def with_values(trajectory: Trajectory, seed: int) -> Trajectory:
    """The trajectory with entries in some columns."""
    rng, content = np.random.default_rng(seed), trajectory.content
    assert isinstance(content, Tokens)
    trained = content.tokens[positions(content.starts, content.ends)].tolist()
    sizes = rng.integers(0, 3, len(trained)).tolist()
    # Words of a teacher and their log-probabilities are one law, so both are known or none.
    chance = {column: rng.random() for column in STORED}
    chance |= dict.fromkeys([each for each in STORED if each.is_computed], rng.random())
    chance |= dict.fromkeys([each for each in STORED if each.name.startswith("teacher_topk")], rng.random())
    given_columns = [column for column in STORED if chance[column] < 0.6]
    values = {column.name: value_of(column, trained, sizes, rng) for column in given_columns}
    whole: dict[str, Any] = {column.whole: 0.25 for column in STORED if column.whole and column.name not in values}
    return replace(trajectory, content=replace(content, **values), **(whole if rng.random() < 0.5 else {}))


def entry(value: Any) -> Any:
    """One entry as a plain value; None if it is missing."""
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return tuple(value.tolist()) or None
    return None if np.isnan(value) else float(value)


def of_trajectories(made: Iterable[Trajectory]) -> Entries:
    found: Entries = {}
    for trajectory in made:
        content = trajectory.content
        assert isinstance(content, Tokens)
        at = positions(content.starts, content.ends).tolist()
        for column in STORED:
            values = getattr(content, column.name)
            if values is None and column.whole is not None and getattr(trajectory, column.whole) is not None:
                values = np.full(len(at), getattr(trajectory, column.whole), column.kind.dtype)
            for i, position in enumerate(at if values is not None else []):
                one = entry(values.list(i) if isinstance(values, RaggedArray) else values[i])
                if one is not None:
                    found[trajectory.trajectory_id, position, column.name] = one
    return found


def of_rows(rows: Iterable[Row]) -> Entries:
    found: Entries = {}
    for row in rows:
        for column in COLUMNS if row.terms is not None else ():
            values = getattr(row.terms, column.name)
            for t in range(len(row.terms.token) if values is not None and row.terms is not None else 0):
                assert row.terms is not None
                one = entry(values.list(t) if isinstance(values, RaggedArray) else values[t])
                if one is not None:
                    name, position = row.trajectory_ids[row.terms.trajectory[t]], row.position_ids[row.terms.token[t]]
                    found[name, int(position), column.name] = one
    return found


def of_terms(terms: Any, ids: Iterable[str]) -> Entries:
    """The entries of `TermTensors`, those of a law through the token that it belongs to."""
    found: Entries = {}
    names, index = list(ids), terms.index.long()
    columns = {column.name: getattr(terms, column.name) for column in COLUMNS if column.is_in_batches}
    laws = {column.name for column in LAWS}
    for t, position in enumerate(terms.position.tolist()):
        key = names[terms.trajectory[t]], position
        own = {
            name: values[index[t : t + 1] if name in laws else slice(t, t + 1)]
            for name, values in columns.items()
            if values is not None
        }
        for name, value in own.items():
            one = tuple(value.values.tolist()) or None if hasattr(value, "offsets") else entry(value.numpy()[0])
            if one is not None:
                found[(*key, name)] = one
        if terms.teacher is not None:
            law = terms.teacher[index[t : t + 1]]
            used = law.values[0] > -np.inf
            if used.any():
                found[(*key, "teacher_topk_ids")] = tuple(law.ids[0][used].tolist())
                found[(*key, "teacher_topk_logprobs")] = tuple(law.values[0][used].tolist())
    return found


def columns_with_values(trajectory: Trajectory) -> set[str]:
    """Columns of a trie in which the trajectory has a value."""
    given = [(getattr(trajectory, column.whole or "", None), column.whole) for column in STORED]
    given += [(getattr(trajectory.content, column.name), column.stored) for column in STORED]
    return {name for value, name in given if value is not None and name is not None}


def of_rank_shares(batches: list[Any], ranks: int) -> list[Entries]:
    """The entries of each share that a rank gets: the joined passes of its rows, or its tokens of every row."""
    from treepack.data.joined import join_rows, terms_of_row
    from treepack.model.head.term_prices import _place_terms
    from treepack.sequence.share import SequenceGroup
    from treepack.train.passes import Joining, deal

    sizes = np.array([batch.input_ids.shape[-1] for batch in batches], np.int64)
    # Only rows with the same columns of terms are joined.
    columns = [tuple(c.name for c in COLUMNS if getattr(batch.terms, c.name, None) is not None) for batch in batches]
    kinds = np.array([sorted(set(columns)).index(each) for each in columns], np.int64)
    shares: list[Entries] = []
    for passes in deal(range(len(batches)), sizes.astype(np.float64), ranks, Joining(24, sizes, kinds)):
        shares.append({})
        for rows in filter(None, passes):
            joined = join_rows([batches[row] for row in rows], multiple=8)
            assert joined.terms is not None
            for number, row in enumerate(rows):
                terms = joined.terms if joined.edges is None else terms_of_row(joined.terms, joined.edges, number)
                shares[-1] |= of_terms(terms, batches[row].trajectory_ids)
    for rank in range(ranks):
        shares.append({})
        for batch in batches:
            share = SequenceGroup(None, rank, ranks).share(batch.input_ids.shape[-1])
            targets = batch.terms.tokens.long(), batch.input_ids.flatten(), batch.parent.flatten().long()
            places, _ = share.own_targets(targets)
            _, _, own, _ = _place_terms(batch.terms, places, None, len(batch.terms.tokens))
            shares[-1] |= of_terms(own, batch.trajectory_ids)
    return shares


def check_stages(made: list[Trajectory], folder: Path) -> None:
    """Check that each entry of `made` comes out of every stage as it went in, and that no stage adds one."""
    from treepack.data.batch import TermTensors, make_batch, select_terms
    from treepack.data.joined import join_rows, terms_of_row

    expected = of_trajectories(made)
    for name in ("trie", "packed"):
        (folder / name).mkdir(parents=True)
    write_trie(build_trie(made), folder / "trie")
    trie = read_trie(folder / "trie")
    check_trie(trie)
    assert of_trajectories(trajectories_of(trie)) == expected
    # An optional column exists only if a trajectory has a value, and runs on disk give the table that memory gives.
    fields_of = {name for each in made for name in columns_with_values(each)}
    assert {*trie.trajectories.column_names} & TRIE_COLUMNS - {*schema.TRAJECTORIES.names} == fields_of - {
        *schema.TRAJECTORIES.names
    }
    in_memory = build_trie(made).trajectories
    pairs = [as_columns(made[i : i + 2]) for i in range(0, len(made), 2)]
    on_disk = build_large_trie(pairs, run_bytes=400).trajectories
    assert on_disk.schema.equals(in_memory.schema, check_metadata=True)
    assert repr(on_disk.to_pylist()) == repr(in_memory.to_pylist())
    shorter, _ = fit_capacity(trie, 4, too_long="truncate")
    kept = {each.trajectory_id for each in trajectories_of(shorter)}
    assert of_trajectories(trajectories_of(shorter)) == {
        key: value for key, value in expected.items() if key[0] in kept and key[1] < 4
    }
    rows = list(pack_rows(trie, plan_rows(trie, capacity=12, method="contiguous")))
    options = Provenance(options={"semantics": "branch", "normalize": "token"})
    write_packed(rows, folder / "packed", capacity=12, provenance=options)
    read = list(read_rows(folder / "packed"))
    check_packed(read, read_manifest(folder / "packed", "treepack-packed"), trie)
    if read[0].terms is None:
        return
    assert of_rows(read) == expected
    assert of_rows([concatenate_rows(read)]) == expected
    batches = [make_batch(row, multiple=4) for row in read]
    joined = join_rows(batches, multiple=8)
    assert joined.terms is not None

    def alone(terms: TermTensors | None, number: int) -> Entries:
        assert terms is not None
        return of_terms(terms, batches[number].trajectory_ids)

    of_batches: Entries = {}
    for number, batch in enumerate(batches):
        of_batches |= alone(batch.terms, number)
        if joined.edges is not None:
            cut = terms_of_row(joined.terms, joined.edges, number)
            # A column of terms that one row lacks is left out of joined rows; laws stay.
            shared = {column.name for column in COLUMNS if getattr(joined.terms, column.name, None) is not None}
            shared |= {"teacher_topk_ids", "teacher_topk_logprobs"} if joined.terms.teacher is not None else set()
            own = {key: value for key, value in alone(batch.terms, number).items() if key[2] in shared}
            assert alone(cut, number) == own
    assert of_batches == expected
    for ranks in (2, 3):
        shares = of_rank_shares(batches, ranks)
        for of_ranks in (shares[:ranks], shares[ranks:]):
            assert sum(map(len, of_ranks)) == len(expected)  # no rank has an entry of a different rank
            assert {key: value for each in of_ranks for key, value in each.items()} == expected
    one = batches[0].terms
    assert one is not None
    pieces: Entries = {}
    for begin in range(0, len(one.index), 3):
        pieces |= alone(select_terms(one, slice(begin, begin + 3)), 0)
    assert pieces == alone(one, 0)


@given(made=trajectories(steps=False), seed=st.integers(0, 2**20))
def test_entries_of_every_column_pass_all_stages_unchanged(
    made: list[Trajectory], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("torch")
    check_stages([with_values(each, seed + i) for i, each in enumerate(made)], tmp_path_factory.mktemp("stages"))


def two_laws() -> list[Trajectory]:
    """Three rollouts through one token: two laws on it, and a rollout that lacks every column."""
    made = []
    for i, tail in enumerate([[7], [8], [9]]):
        values: dict[str, Any] = {}
        for column in STORED if i < 2 else ():
            rng = np.random.default_rng(i)
            value = value_of(column, [2, *tail], [i + 1, 2], rng)
            law = column.sharing is Sharing.LAW and not isinstance(column.kind, Lists)
            values[column.stored or ""] = np.array([0.5 + i / 4, 1], column.kind.dtype) if law else value
        made.append(make(f"t{i}", [1, 2, *tail], **values))
    return made


def test_two_laws_on_one_token_and_a_rollout_without_any_stay_apart(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    made = two_laws()
    assert {key[2] for key in of_trajectories(made)} == {column.name for column in STORED}
    check_stages(made, tmp_path)


def merge_laws(_: Any, codes: Any, __: Any) -> Any:
    return codes


def zeros_for_missing(self: Any, values: Any, num: int) -> Any:
    return np.zeros(num) if values is None else np.broadcast_to(values, num)


def terms_of_all_ranks(terms: Any, *_: Any) -> Any:
    return None, None, terms, None


def reversed_order(self: Any, parts: Any) -> Any:
    return np.concatenate(parts[::-1]).astype(self.dtype)


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        ("treepack.data.batch._with_law", merge_laws),
        ("treepack.columns.Numbers.filled", zeros_for_missing),
        ("treepack.columns.Numbers.join", reversed_order),
        ("treepack.model.head.term_prices._place_terms", terms_of_all_ranks),
    ],
    ids=["merged laws", "zeros for missing entries", "wrong order", "terms of a different rank"],
)
def test_planted_faults_are_found(place: str, fault: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(place, fault)
    with pytest.raises((AssertionError, TreepackError)):
        check_stages(two_laws(), tmp_path)


ROOMS = ("trie", "pack", "files", "data", "carry", "online", "cluster")
# Files of these rooms, and of the top of treepack, that name a column in code, beside the fields of three classes. One
# is the table; the others are special for a reason, and all other code is a loop over the table.
MAX_FILES = {
    "sampling_logprob": 2,
    "old_logprob": 2,
    "ref_logprob": 2,
    "entropy": 3,
    "edge_factor": 2,
    "teacher_logprob": 1,
    "returns": 5,
    "old_values": 3,
    "teacher_topk_ids": 4,
    "teacher_topk_logprobs": 4,
    "advantage": 7,
    "kept_ids": 6,
    "temperature": 14,
}
TYPED = ("Tokens", "RowTerms", "TermTensors")


def words_of(tree: ast.AST) -> Iterator[str]:
    """Names, attributes, arguments and texts in code, except the fields of the typed classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(tree, ast.ClassDef) and tree.name in TYPED and isinstance(node, ast.AnnAssign):
            continue
        words = (getattr(node, field, None) for field in ("id", "attr", "arg", "value", "name"))
        yield from (word for word in words if isinstance(word, str))
        yield from words_of(node)


def files_that_name(column: Column) -> list[str]:
    """Files with a name, an attribute, an argument or a text that is exactly a name of the column."""
    names = {column.name, column.packed, *column.sources}
    top = ROOT / "treepack"
    paths = [*top.glob("*.py"), *(path for room in ROOMS for path in (top / room).rglob("*.py"))]
    found = []
    for path in paths:
        if not names.isdisjoint(words_of(ast.parse(path.read_text()))):
            found.append(str(path.relative_to(top)))
    return sorted(found)


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_few_files_name_a_column(column: Column) -> None:
    named = files_that_name(column)
    assert "columns.py" in named
    assert len(named) <= MAX_FILES[column.name], named
