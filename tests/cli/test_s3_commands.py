"""Every command reads objects of an S3 server and writes them, with the results of local files."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from support.command_line import Result, Run
from support.paths import SAMPLE_DATA
from support.s3 import Store
from treepack.files.input_files import remote_inputs
from treepack.files.manifest import read_manifest

pytestmark = pytest.mark.s3

MODEL = SAMPLE_DATA / "tiny-qwen3.json"
KEY = "räume/dir with spaces"


def write_attempts(path: Path) -> Path:
    """Two prompts of four rollouts of two turns, with rewards of 0 and 1."""
    records = []
    for group in range(2):
        for k in range(4):
            prompt, turn = [1, 2, 10 + group], [20 + k % 2, 3, 4]
            ids = [*prompt, *turn, 5, 6, 30 + k, 7]
            mask = [0] * 3 + [1] * 3 + [0] * 2 + [1] * 2
            record = {"id": f"g{group}/{k}", "group_id": f"g{group}", "input_ids": ids, "loss_mask": mask}
            records.append(record | {"reward": float(k % 3 == 0)})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def successful(result: Result) -> Result:
    assert result.status == 0, result.err
    return result


def without_addresses(manifest: object) -> object:
    """Return a manifest without the names of its parts, hashes that follow from addresses, and addresses."""
    text = json.loads(json.dumps(manifest))
    text["files"] = [entry["rows"] for entry in text["files"]]
    text.pop("sha256")
    text.pop("trie", None)
    return text


def test_every_command_reads_and_writes_objects(treepack: Run, s3: Store, tmp_path: Path) -> None:
    rollouts = write_attempts(tmp_path / "attempts.jsonl")
    s3.write(f"{KEY}/attempts.jsonl", rollouts.read_bytes())
    here, there = tmp_path / "local", s3.address(KEY)
    here.mkdir()
    (here / "attempts.jsonl").write_bytes(rollouts.read_bytes())

    def run(name: str, *arguments: object) -> tuple[str, str]:
        """Run a command on local files and on objects; {} in an argument is the folder. Return both outputs."""
        outputs = []
        for folder in (here, there):
            arguments_here = [str(argument).replace("{}", str(folder)) for argument in arguments]
            result = successful(treepack(name, *arguments_here))
            outputs.append(result.out.replace(str(folder), "{}"))
        return outputs[0], outputs[1]

    def assert_same_file(name: str) -> None:
        assert s3.read(f"{KEY}/{name}") == (here / name).read_bytes()

    def assert_same_directory(name: str) -> None:
        local, remote = read_manifest(here / name), read_manifest(f"{there}/{name}")
        assert without_addresses(local) == without_addresses(remote)
        for one, other in zip(local["files"], remote["files"], strict=True):
            if one["name"].startswith(("nodes", "part")):
                assert s3.read(f"{KEY}/{name}/{other['name']}") == (here / name / one["name"]).read_bytes()

    run("build-trie", "{}/attempts.jsonl", "--out", "{}/trie")
    assert_same_directory("trie")
    assert s3.names(KEY) == sorted(
        [f"{KEY}/attempts.jsonl", *(f"{KEY}/trie/{name}" for name in [*parts_of(f"{there}/trie"), "manifest.json"])]
    )
    run("pack", "{}/trie", "--capacity", 16, "--out", "{}/packed", "--save-plan", "{}/plan.jsonl")
    assert_same_directory("packed")
    assert read_manifest(f"{there}/packed")["trie"]["path"] == f"{there}/trie"
    run("pack", "{}/trie", "--plan", "{}/plan.jsonl", "--out", "{}/replanned")
    for name in ("attempts.jsonl", "trie", "packed"):
        one, other = run("stats", f"{{}}/{name}", "--json", *([] if name == "attempts.jsonl" else ["--check"]))
        assert json.loads(one) == json.loads(other)
        one, other = run("show", f"{{}}/{name}")
        assert one == other
    assert json.loads(run("stats", "{}/packed", "--json", "--check")[1])["checked"]["against_trie"] is True
    run("advantages", "{}/trie", "--estimator", "grpo", "--out", "{}/advantages")
    assert_same_directory("advantages")
    one, other = run("simulate", "allocation", "{}/trie", "--steps", 2, "--budget", 4, "--candidates", 2, "--json")
    assert json.loads(one) == json.loads(other)
    run("report", "{}/packed", "--out", "{}/page.html", "--png", "{}/pictures")
    assert_same_file("page.html")
    assert [name.name for name in sorted((here / "pictures").iterdir())] == [
        name.rpartition("/")[2] for name in s3.names(f"{KEY}/pictures/")
    ]
    run("logprobs", "{}/packed", "--model", MODEL, "--entropies", "--out", "{}/scored")
    assert_same_directory("scored")
    run("augment", "{}/trie", "--packed", "{}/scored", "--out", "{}/queries.jsonl")
    assert_same_file("queries.jsonl")
    run("select", "update", "{}/state", "--rollouts", "{}/trie", "--add-groups", "--queries", "{}/queries.jsonl")
    run("select", "update", "{}/state", "--rollouts", "{}/trie")
    assert_same_file("state")
    run("select", "{}/state", "--k", 2, "--out", "{}/chosen.jsonl")
    assert_same_file("chosen.jsonl")
    run("values", "fit", "{}/trie", "--model", MODEL, "--epochs", 1, "--out", "{}/predictor")
    assert s3.read(f"{KEY}/predictor/model.safetensors") == (here / "predictor/model.safetensors").read_bytes()
    assert not [name for name in s3.names(f"{KEY}/predictor") if "unfinished" in name]
    run("values", "predict", "{}/trie", "--values", "{}/predictor", "--out", "{}/values.parquet")
    assert_same_file("values.parquet")
    run("allocate", "roots", "{}/values.parquet", "--budget", 8, "--out", "{}/roots.jsonl")
    assert_same_file("roots.jsonl")
    run(
        "allocate", "prefixes", "{}/trie", "--predictions", "{}/values.parquet", "--expand", 2, "--out", "{}/more.jsonl"
    )
    assert_same_file("more.jsonl")
    run("stats", "{}/trie", "--predictions", "{}/values.parquet", "--json")
    run("prepare", "{}/attempts.jsonl", "--advantages", "grpo", "--capacity", 16, "--out", "{}/prepared")
    assert_same_directory("prepared/packed")
    assert not list(tmp_path.glob("s3*"))


def parts_of(directory: str) -> list[str]:
    return [entry["name"] for entry in read_manifest(directory)["files"]]


def test_a_trie_of_objects_differs_only_in_recorded_addresses(
    treepack: Run, s3: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "rollouts"
    (folder / "more").mkdir(parents=True)
    write_attempts(folder / "a.jsonl")
    (folder / "more" / "b.jsonl").write_text(folder.joinpath("a.jsonl").read_text().replace('"g', '"h'))
    (folder / "notes.txt").write_text("not read")
    s3.upload(folder, "rollouts")
    successful(treepack("build-trie", folder, "--out", tmp_path / "trie"))
    names = {"rollouts": ["rollouts"], "globs": ["rollouts/*.jsonl", "rollouts/m*/b.jsonl"], "large": ["rollouts"]}
    for out, inputs in names.items():
        if out == "large":
            monkeypatch.setattr(remote_inputs, "LARGE", 1)  # so that every file is copied when it is read
        for workers in (1, 2):
            addresses = [s3.address(name) for name in inputs]
            options = ["--workers", workers, "--out", tmp_path / f"{out}-{workers}"]
            successful(treepack("build-trie", *addresses, *options))
            local, remote = read_manifest(tmp_path / "trie"), read_manifest(tmp_path / f"{out}-{workers}")
            assert local["input"] == remote["input"]
            assert local["totals"] == remote["totals"]
            assert local["files"][0] == remote["files"][0]  # nodes
            one, other = (
                pq.read_table(path / "trajectories-00000.parquet")
                for path in (tmp_path / "trie", tmp_path / f"{out}-{workers}")
            )
            assert one.drop_columns("source").equals(other.drop_columns("source"))
            expected = [source.replace(str(tmp_path), s3.address()) for source in one["source"].to_pylist()]
            assert other["source"].to_pylist() == expected
    assert "file extension .txt not read" in treepack("stats", s3.address("rollouts")).out
