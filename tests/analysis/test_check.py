"""Checks of directories: each kind of damage is named, and random damage is found or harmless."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.command_line import Run
from support.damage import BYTE_DAMAGES, ODD_VALUES
from support.manifests import seal
from support.paths import SAMPLE_DATA
from support.written_rollouts import write_rollouts
from treepack import PackOptions, pack_trie
from treepack.analysis.check import check
from treepack.errors import TreepackError
from treepack.files.manifest import file_sha256
from treepack.trie import storage
from treepack.trie.directory import build_trie_directory


@pytest.fixture
def trie(tmp_path: Path) -> Path:
    build_trie_directory([write_rollouts(tmp_path / "rollouts.jsonl")], tmp_path / "trie")
    return tmp_path / "trie"


@pytest.fixture
def packed(treepack: Run, trie: Path, tmp_path: Path) -> Path:
    assert treepack("pack", trie, "--capacity", 12, "--out", tmp_path / "packed").status == 0
    return tmp_path / "packed"


def change_manifest(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((directory / "manifest.json").read_text())
    change(manifest)
    seal(directory / "manifest.json", manifest)


def refusals(treepack: Run, directory: Path) -> str:
    """The sentence of the library, which must be that of the command too."""
    with pytest.raises(TreepackError) as error:
        check(directory)
    result = treepack("stats", directory, "--check")
    assert (result.status, result.err) == (1, f"treepack: {error.value}\n")
    return str(error.value)


def test_the_trie_of_rows_is_found_from_another_folder(
    treepack: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rollouts(Path("rollouts.jsonl"))
    assert treepack("prepare", "rollouts.jsonl", "--capacity", 12, "--out", "data").status == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    missing = "not compared with a trie"
    assert missing not in treepack("stats", "../data/packed", "--check").out
    shutil.rmtree("../data/trie")
    assert missing in treepack("stats", "../data/packed", "--check").out


@pytest.mark.parametrize("which", ["trie", "packed"])
def test_max_token_id_is_computed_again(treepack: Run, trie: Path, packed: Path, which: str) -> None:
    directory = {"trie": trie, "packed": packed}[which]
    largest = json.loads((directory / "manifest.json").read_text())["max_token_id"]
    change_manifest(directory, lambda manifest: manifest.update(max_token_id=largest - 1))
    sentence = f"the files give max_token_id = {largest}, the manifest lists {largest - 1}; write it again"
    assert refusals(treepack, directory) == sentence


def test_row_id_is_the_place_of_the_row(treepack: Run, packed: Path) -> None:
    path = packed / "part-00000.parquet"
    table = pq.read_table(path)
    ids = [77, *table["row_id"].to_pylist()[1:]]
    pq.write_table(table.set_column(0, table.schema.field("row_id"), pa.array(ids, pa.int64())), path)
    sizes = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    change_manifest(packed, lambda manifest: manifest["files"][0].update(sizes))
    assert refusals(treepack, packed) == "row 0: has the row_id 77; expected its place; pack the trie again"


@pytest.mark.parametrize("which", ["trie", "packed"])
def test_a_part_that_is_a_link_out_of_the_directory_is_refused(
    treepack: Run, trie: Path, packed: Path, tmp_path: Path, which: str
) -> None:
    directory = {"trie": trie, "packed": packed}[which]
    part = next(directory.glob("*-00000.parquet"))
    part.rename(tmp_path / "elsewhere.parquet")
    part.symlink_to(tmp_path / "elsewhere.parquet")
    assert "is a link to" in refusals(treepack, directory)
    part.unlink()
    (tmp_path / "elsewhere.parquet").rename(directory / "blob")
    part.symlink_to("blob")  # inside the directory it is harmless
    assert treepack("stats", directory, "--check").status == 0


TOKENS = SAMPLE_DATA / "tokens.jsonl"


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A trie of few rollouts, and its rows."""
    folder = tmp_path_factory.mktemp("directories")
    rollouts = folder / "r.jsonl"
    rollouts.write_text("".join(TOKENS.read_text().splitlines(keepends=True)[:12]))
    build_trie_directory([rollouts], folder / "trie")
    pack_trie(folder / "trie", folder / "packed", PackOptions(capacity=4096))
    return [folder / "trie", folder / "packed"]


def seal_parts(directory: Path, manifest: Any) -> None:
    """Write `manifest` with the right sizes and hashes of all parts, and its own hash."""
    for entry in manifest.get("files") if isinstance(manifest.get("files"), list) else []:
        path = directory / str(entry.get("name")) if isinstance(entry, dict) else directory
        if path.is_file():
            entry |= {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    manifest.pop("sha256", None)
    text = json.dumps(manifest, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
    own = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    text = json.dumps(manifest | {"sha256": own}, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
    (directory / "manifest.json").write_bytes(text.encode("utf-8", "surrogatepass"))


def damage_bytes(directory: Path, rng: random.Random) -> bool:
    """Damage a file as a disk does. Return True if the check must notice it."""
    path = rng.choice(sorted(directory.iterdir()))
    before = path.read_bytes()
    path.write_bytes(rng.choice(BYTE_DAMAGES)(before, rng))
    return path.read_bytes() != before


def damage_manifest(directory: Path, rng: random.Random) -> bool:
    """Change a value of the manifest, with right hashes."""
    manifest = json.loads((directory / "manifest.json").read_bytes())
    parent: Any = manifest
    key: Any = rng.choice(sorted(manifest))
    while isinstance(parent[key], dict | list) and parent[key] and rng.random() < 0.8:
        parent = parent[key]
        key = rng.choice(sorted(parent) if isinstance(parent, dict) else range(len(parent)))
    if rng.random() < 0.2:
        del parent[key]
    else:
        parent[key] = rng.choice(ODD_VALUES)
    seal_parts(directory, manifest)
    return False


def damage_table(directory: Path, rng: random.Random) -> bool:
    """Change, remove or repeat a value or a row of a part, with right hashes."""
    manifest = json.loads((directory / "manifest.json").read_bytes())
    path = directory / rng.choice(manifest["files"])["name"]
    table = pq.read_table(path)
    column, row = rng.randrange(table.num_columns), rng.randrange(table.num_rows)
    action = rng.random()
    if action < 0.15:
        table = table.slice(0, row)
    elif action < 0.3:
        table = pa.concat_tables([table, table.slice(row, 1)])
    elif action < 0.4:
        table = table.remove_column(column)
    else:
        values = table.column(column).to_pylist()
        values[row] = _other(values[row], rng)
        field = table.schema.field(column)
        try:
            changed = pa.array(values, field.type)
        except (pa.ArrowException, OverflowError, ValueError, TypeError):
            changed = pa.nulls(len(values), field.type)
        table = table.set_column(column, pa.field(field.name, field.type, metadata=field.metadata), changed)
    pq.write_table(table, path)
    seal_parts(directory, manifest)
    return False


def _other(value: Any, rng: random.Random) -> Any:
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        if rng.random() < 0.3:
            return [*value[:place], *value[place + 1 :]]
        return [*value[:place], _other(value[place], rng), *value[place + 1 :]]
    if isinstance(value, int):
        return rng.choice([value + 1, value - 1, -value, 0, -1, 2**31 - 1, None])
    if isinstance(value, float):
        return rng.choice([-value, value * 2, float("nan"), float("inf"), 1e300, None])
    return rng.choice([None, "", "x", [], [0]])


def first_fault(folder: Path) -> str | None:
    """Return the sentence in which the check refuses a trie and its rows; None if they are intact."""
    try:
        for each in ("trie", "packed"):
            check(folder / each, trie=folder / "trie")
    except TreepackError as refusal:
        return str(refusal)
    return None


def check_damaged(seed: int, directories: list[Path], folder: Path) -> str:
    """Damage one directory and check it; return "intact" or "refused"."""
    rng = random.Random(seed)
    for directory in directories:
        shutil.copytree(directory, folder / directory.name)
    damage, name = rng.choice([damage_bytes, damage_manifest, damage_table]), rng.choice(["trie", "packed"])
    try:
        must_fail = damage(folder / name, rng)
        fault = first_fault(folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(storage, "SHARE", 1 << 60)  # a trie larger than the memory has the same fault
            assert first_fault(folder) == fault, f"seed {seed}"
        if fault is not None:
            assert "\n" not in fault, f"seed {seed}: several lines: {fault}"
            return "refused"
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(folder)
    assert not must_fail, seed
    return "intact"


@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 140), marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_a_damaged_directory_is_refused_in_one_sentence_or_intact(
    seeds: range, directories: list[Path], tmp_path: Path
) -> None:
    results = [check_damaged(seed, directories, tmp_path / "copies") for seed in seeds]
    assert results.count("refused") > len(seeds) / 3
