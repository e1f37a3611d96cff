"""A trie with recorded routes is the same for any number of processes and any memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest

from support.recorded_routes import ROWS
from support.refusal import refusal
from treepack.ingest.options import BuildOptions
from treepack.trie.directory import build_trie_directory, read_to_trie


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
