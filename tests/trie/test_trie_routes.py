"""Recorded routes in a trie: part of the identity of its nodes, for any number of processes and any memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.oracle import count_tokens, dict_trie
from support.recorded_routes import ROWS, ROWS_OF_256, routed_trajectories, with_routes
from support.refusal import refusal
from support.strategies import make
from treepack.ingest.options import BuildOptions
from treepack.rl.segments import segment_tree
from treepack.sequences import collect
from treepack.trajectory import Routes, Tokens, Trajectory, missing_route
from treepack.trie.builders.in_memory import build_trie, route_costs
from treepack.trie.check import check_trie
from treepack.trie.directory import build_trie_directory, read_to_trie
from treepack.trie.route_symbols import splits_by_routes
from treepack.trie.store.trie_files import read_trie, write_trie
from treepack.trie.trie import Trie, trajectories_of, unshared

Row = tuple[tuple[int, ...], ...]


def sets_of(trajectory: Trajectory) -> list[Row]:
    """The experts of each token and layer, ascending; an empty set where none was recorded."""
    content = trajectory.content
    assert isinstance(content, Tokens)
    if content.routes is None:
        return [((), ())] * len(content.tokens)
    missing = missing_route(content.routes)
    rows = content.routes.tolist()
    return [tuple(() if set(layer) == {missing} else tuple(sorted(layer)) for layer in row) for row in rows]


def by_id(trie: Trie) -> dict[str, list[Row]]:
    return {each.trajectory_id: sets_of(each) for each in trajectories_of(trie)}


NONE: Row = ((), ())


@given(routed=routed_trajectories() | routed_trajectories(table=ROWS_OF_256))
def test_a_split_trie_gives_each_trajectory_its_own_routes(routed: list[Trajectory]) -> None:
    trie = build_trie(routed)
    check_trie(trie)
    found = by_id(trie)
    for each in routed:
        own, other = sets_of(each), found[each.trajectory_id]
        # A last token without experts has those of another trajectory if that one continues with this token.
        assert own[:-1] == other[:-1]
        assert own[-1] in (NONE, other[-1])


def test_a_last_token_without_experts_is_shared_with_the_first_one_that_has_some() -> None:
    rows = np.array([ROWS[0], ROWS[0], ROWS[0], ROWS[0]], np.uint8)
    others, last = rows.copy(), rows[:3].copy()
    others[2] = ROWS[2]
    last[2] = 255
    turns = [
        with_routes(make("a", [1, 2, 3]), last),
        with_routes(make("b", [1, 2, 3, 4]), others),
        with_routes(make("c", [1, 2, 3, 4]), rows),
        with_routes(make("d", [1, 2, 3]), rows[:3]),
        with_routes(make("e", [1, 2, 3, 5]), np.concatenate([last, rows[:1]])),
    ]
    trie = build_trie(turns)
    assert trie.trajectories["trajectory_id"].to_pylist() == ["a", "b", "d", "c", "e"]
    assert trie.tokens.tolist() == [1, 2, 3, 4, 3, 4, 3, 5]
    assert by_id(trie)["a"] == by_id(trie)["b"][:3]
    assert build_trie(turns, share="none").tokens_tree == 3 + 4 + 4 + 3 + 4


@given(routed=routed_trajectories() | routed_trajectories(table=ROWS_OF_256))
def test_a_split_trie_shares_all_that_has_equal_routes(routed: list[Trajectory]) -> None:
    numbers: dict[object, int] = {}
    paths = []
    for each in routed:
        assert isinstance(each.content, Tokens)
        letters = zip(each.content.tokens.tolist(), sets_of(each), strict=True)
        paths.append([numbers.setdefault(letter, len(numbers)) for letter in letters])
    # A last token without experts costs nothing after a prefix that continues with this token and some experts.
    for path, each in zip(paths, routed, strict=True):
        assert isinstance(each.content, Tokens)
        if sets_of(each)[-1] == NONE:
            token = each.content.tokens[-1]
            longer = [
                other[len(path) - 1]
                for other, its in zip(paths, routed, strict=True)
                if other[: len(path) - 1] == path[:-1]
                and len(other) >= len(path)
                and isinstance(its.content, Tokens)
                and its.content.tokens[len(path) - 1] == token
                and sets_of(its)[len(path) - 1] != NONE
            ]
            path[-1] = min(longer, default=path[-1])
    expected = count_tokens(dict_trie(paths))
    assert build_trie(routed).tokens_tree == expected
    assert route_costs(collect(routed), share="all").tokens_split == expected


@given(routed=routed_trajectories() | routed_trajectories(table=ROWS_OF_256))
def test_a_sharing_trie_takes_the_first_recorded_routes_and_counts_the_others(routed: list[Trajectory]) -> None:
    trie = build_trie(routed, route_conflicts="first")
    check_trie(trie)
    plain = build_trie([with_routes(each, None) for each in routed])
    assert trie.tokens.tolist() == plain.tokens.tolist()
    own = {each.trajectory_id: each for each in routed}
    first: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}
    differing = 0
    for each in trajectories_of(plain):  # the order of the trie
        assert isinstance(each.content, Tokens)
        tokens = each.content.tokens.tolist()
        for at, row in enumerate(sets_of(own[each.trajectory_id])):
            rows = [
                (first.setdefault((tuple(tokens[: at + 1]), i), experts), experts)
                for i, experts in enumerate(row)
                if experts
            ]
            differing += any(a != b for a, b in rows)
    for each in trajectories_of(trie):
        assert isinstance(each.content, Tokens)
        tokens = each.content.tokens.tolist()
        expected = [tuple(first.get((tuple(tokens[: at + 1]), i), ()) for i in range(2)) for at in range(len(tokens))]
        assert sets_of(each) == expected
    costs = route_costs(collect(routed), share="all")
    assert costs.differing == differing
    assert costs.tokens_shared == trie.tokens_tree
    assert costs.recorded == sum(any(map(len, row)) for each in routed for row in sets_of(each))


@given(routed=routed_trajectories(), order=st.randoms(use_true_random=False))
def test_the_order_of_arrival_changes_nothing(routed: list[Trajectory], order: object) -> None:
    shuffled = [*routed]
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    a, b = build_trie(routed), build_trie(shuffled)
    assert a.tokens.tolist() == b.tokens.tolist()
    assert a.routes is not None
    assert b.routes is not None
    assert a.routes.tobytes() == b.routes.tobytes()
    assert a.trajectories["trajectory_id"] == b.trajectories["trajectory_id"]


@given(routed=routed_trajectories() | routed_trajectories(table=ROWS_OF_256))
def test_building_again_changes_nothing(routed: list[Trajectory]) -> None:
    for conflicts in ("split", "first"):
        trie = build_trie(routed, route_conflicts=conflicts)
        again = build_trie(trajectories_of(trie))
        assert again.tokens.tolist() == trie.tokens.tolist()
        assert by_id(again) == by_id(trie) == by_id(unshared(trie))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@settings(max_examples=15)
@given(data=st.data())
def test_a_directory_keeps_routes_in_memory_and_in_mapped_files(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: type[np.unsignedinteger],
    data: st.DataObject,
) -> None:
    trie = build_trie(data.draw(routed_trajectories(dtype=dtype)))
    folder: Path = tmp_path_factory.mktemp("trie")
    write_trie(trie, folder)
    assert trie.routes is not None
    for memory in (None, 1):
        read: Routes | None = read_trie(folder, memory=memory).routes
        assert read is not None
        assert read.dtype == trie.routes.dtype == dtype
        assert read.tolist() == trie.routes.tolist()


def test_experts_that_were_not_recorded_stay_so_beside_a_wider_dtype() -> None:
    small, wide = np.array([ROWS[0], ROWS[0]], np.uint8), np.array([ROWS[0], [[300, 1], [2, 3]]], np.uint16)
    small[1] = missing_route(small)
    routes = collect([with_routes(make("a", [1, 2]), small), with_routes(make("b", [1, 2]), wide)]).routes
    assert routes is not None
    assert routes.tolist() == [ROWS[0], [[65535, 65535], [65535, 65535]], ROWS[0], [[300, 1], [2, 3]]]


def test_routes_of_another_model_are_refused() -> None:
    rows = np.array([ROWS[0]] * 3, np.uint8)
    a, b = (make(name, [1, 2, 3]) for name in "ab")
    assert "1 layers with 2 experts and 2 layers with 2 experts" in refusal(
        build_trie, [with_routes(a, rows), with_routes(b, rows[:, :1])]
    )


@given(routed=routed_trajectories() | routed_trajectories(table=ROWS_OF_256))
def test_a_trie_knows_if_it_splits_where_routes_differ(routed: list[Trajectory]) -> None:
    grouped = [replace(each, group_id="g") for each in routed]
    trie, plain = build_trie(grouped), build_trie(grouped, route_conflicts="first")
    assert splits_by_routes(trie) == (trie.tokens_tree > plain.tokens_tree)
    assert not splits_by_routes(plain)


def test_estimators_on_trees_refuse_a_trie_that_splits_where_routes_differ() -> None:
    rows = np.array([ROWS[0]] * 3, np.uint8)
    pair = [with_routes(make("a", [1, 2, 3]), rows), with_routes(make("b", [1, 2, 4]), rows)]
    other = rows.copy()
    other[1] = ROWS[2]
    conflict = [pair[0], with_routes(make("b", [1, 2, 4]), other)]
    members = np.arange(2)
    assert segment_tree(build_trie(pair), members, np.zeros(2, np.int64)).num_groups == 1
    assert "splits where recorded routes differ" in refusal(
        segment_tree, build_trie(conflict), members, np.zeros(2, np.int64)
    )


def test_a_check_finds_impossible_routes() -> None:
    trie = build_trie([with_routes(make("a", [1, 2, 3]), np.array([ROWS[0]] * 3, np.uint8))])
    check_trie(trie)
    for wrong in ([1, 1], [65535, 0]):
        assert trie.routes is not None
        routes = trie.routes.astype(np.uint16)
        routes[2, 1] = wrong
        assert "node 0: has a token with impossible routes" in refusal(check_trie, replace(trie, routes=routes))
    assert trie.routes is not None
    small = trie.routes.copy()
    small[2, 1] = [255, 0]  # expert 255 of 256, and not a missing one
    check_trie(replace(trie, routes=small))


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 rollouts in several files, with equal ids; one in four has no routes, and one has an expert above 254."""
    folder = tmp_path_factory.mktemp("rollouts")
    generator = np.random.default_rng(0)
    for number in range(6):
        lines = []
        for i in range(50):
            ids = [1, 2, 3, *generator.integers(0, 3, generator.integers(1, 9)).tolist()]
            rows = [ROWS[int(each)] for each in generator.choice(3, len(ids) - 1, p=[0.9, 0.05, 0.05])]
            if (number, i) == (3, 7):
                rows[0] = [[0, 300], [2, 3]]
            record = {"id": f"r{i}", "prompt_ids": ids[:2], "response_ids": ids[2:], "routed_experts": rows}
            if generator.random() < 0.25:
                del record["routed_experts"]
            lines.append(orjson.dumps(record))
        (folder / f"{number}.jsonl").write_bytes(b"\n".join(lines))
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in sorted(folder.iterdir())}


# Two processes take a second to start. They read the same for all options; one process builds the trie.
@pytest.mark.parametrize(
    ("share", "conflicts", "most_workers"),
    [
        ("all", "first", 2),
        pytest.param("none", "split", 2, marks=pytest.mark.slow),
        ("all", "split", 1),
        ("none", "first", 1),
    ],
)
def test_bytes_do_not_depend_on_processes_and_memory(
    rollouts: Path, share: str, conflicts: str, most_workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several processes for a small input.
    monkeypatch.setattr("treepack.trie.builders.builder.min_bytes", lambda job: 1)
    built = []
    for workers, memory in [(1, None), (1, 1000), (2, 1000)][: most_workers + 1]:
        options = BuildOptions(keep_routes=True, route_conflicts=conflicts, share=share, workers=workers)
        out = tmp_path / f"{workers}-{memory}"
        build_trie_directory([rollouts], out, options, memory=memory)
        built.append(files_of(out))
    for other in built[1:]:
        assert other.keys() == built[0].keys()
        assert all(other[name] == built[0][name] for name in other if name != "manifest.json")
        manifests = [orjson.loads(each["manifest.json"]) for each in (other, built[0])]
        assert manifests[0]["routes"] == manifests[1]["routes"]
        assert manifests[0]["totals"] == manifests[1]["totals"]


def test_large_routes_are_mapped(rollouts: Path) -> None:
    options = BuildOptions(keep_routes=True)
    small, _ = read_to_trie([rollouts], options)
    large, _ = read_to_trie([rollouts], options, memory=1000)
    assert not small.storage.maps
    assert len(large.storage.maps) == 1
    assert small.routes is not None
    assert large.routes is not None
    assert small.routes.dtype == np.uint16
    assert large.routes.tolist() == small.routes.tolist()
    # Batches of uint8 have another number for experts that were not recorded than the whole.
    assert np.unique(small.routes).tolist() == [0, 1, 2, 3, 300, 65535]


def test_input_without_routes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(orjson.dumps({"prompt_ids": [1], "response_ids": [2, 3]}))
    assert "no rollout has recorded routes" in refusal(read_to_trie, [tmp_path], BuildOptions(keep_routes=True))
