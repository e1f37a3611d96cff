"""Two commands with one output, as real processes: one works, the other is refused, and nothing is lost."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.command_line import Run
from support.paths import SAMPLE_DATA
from support.written_rollouts import write_rollouts

TREEPACK = Path(sys.executable).parent / "treepack"


@contextmanager
def waiting_build(out: Path, *prefix: str) -> Iterator[subprocess.Popen[str]]:
    """A `treepack build-trie` that has its lock and waits for the rest of its standard input."""
    command = [*prefix, str(TREEPACK), "build-trie", "-", "--out", str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not list(out.parent.glob(".trie.partial-*")):
            assert process.poll() is None
        try:
            yield process
        finally:
            process.kill()


def can_make_pid_namespaces() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("namespace", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_second_command_is_refused_and_the_first_ends_well(treepack: Run, tmp_path: Path, namespace: bool) -> None:
    if namespace and not can_make_pid_namespaces():
        pytest.skip("no permission to make a pid namespace, as a container has one")
    rollouts, out = write_rollouts(tmp_path / "rollouts.jsonl"), tmp_path / "trie"
    with waiting_build(out, *(["unshare", "--pid", "--fork", "--kill-child"] if namespace else [])) as first:
        for more in ([], ["--overwrite"]):
            second = treepack("build-trie", rollouts, "--out", out, *more)
            assert second.status == 1
            assert "trie: is being written by process" in second.err
        first.communicate(rollouts.read_text())
        assert first.returncode == 0
    assert treepack("stats", out, "--check").status == 0
    assert {path.name for path in tmp_path.iterdir()} == {"rollouts.jsonl", "trie"}


def test_a_killed_command_can_be_run_again_at_once(treepack: Run, tmp_path: Path) -> None:
    rollouts, out = write_rollouts(tmp_path / "rollouts.jsonl"), tmp_path / "trie"
    with waiting_build(out) as first:
        first.kill()
        first.wait()
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == {
        "rollouts.jsonl",
        ".trie.lock",
        ".trie.partial",
    }
    assert treepack("build-trie", rollouts, "--out", out).status == 0
    assert {path.name for path in tmp_path.iterdir()} == {"rollouts.jsonl", "trie"}


def test_a_trie_may_be_written_into_the_folder_of_its_rollouts(treepack: Run, tmp_path: Path) -> None:
    # Neither the lock nor the unfinished trie of a different command is an input.
    folder = tmp_path / "rollouts"
    folder.mkdir()
    write_rollouts(folder / "a.jsonl")
    with waiting_build(folder / "trie"):
        result = treepack("build-trie", folder, "--out", folder / "other")
    assert result.status == 0
    assert "not read" not in result.out + result.err
    assert treepack("stats", folder / "other", "--json").json["num_trajectories"] == 6


def test_every_command_with_an_output_refuses_one_that_is_being_written(treepack: Run, tmp_path: Path) -> None:
    trie, packed, values = tmp_path / "trie", tmp_path / "packed", tmp_path / "values.jsonl"
    assert treepack("build-trie", SAMPLE_DATA / "tokens.jsonl", "--out", trie).status == 0
    assert treepack("pack", trie, "--capacity", 4096, "--out", packed).status == 0
    values.write_text("{}\n")
    commands: dict[str, list[object]] = {
        "out.d": ["build-trie", SAMPLE_DATA / "tokens.jsonl", "--out"],
        "rows.d": ["pack", trie, "--capacity", 4096, "--out"],
        "plan.jsonl": ["pack", trie, "--capacity", 4096, "--out", tmp_path / "rows", "--save-plan"],
        "advantages.d": ["advantages", trie, "--estimator", "grpo", "--out"],
        "roots.jsonl": ["allocate", "roots", values, "--budget", 10, "--out"],
        "prefixes.jsonl": ["allocate", "prefixes", trie, "--predictions", values, "--expand", 2, "--out"],
        "queries.jsonl": ["augment", trie, "--packed", packed, "--out"],
        "chosen.jsonl": ["select", "nearest", tmp_path / "state", "--k", 1, "--out"],
        "page.html": ["report", trie, "--out"],
        "pictures": ["report", trie, "--png"],
        "both.d": ["prepare", SAMPLE_DATA / "tokens.jsonl", "--out"],
        "model.d": ["train", packed, "--model", SAMPLE_DATA / "tiny-qwen3.json", "--out"],
        "logprobs.d": ["logprobs", packed, "--model", tmp_path / "none", "--out"],
        "values.d": ["values", "fit", trie, "--model", tmp_path / "none", "--out"],
        "values.parquet": ["values", "predict", trie, "--values", tmp_path / "none", "--out"],
    }
    for name, command in commands.items():
        with (tmp_path / f".{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            result = treepack(*command, tmp_path / name)
        assert result.status == 1, name
        assert f"{name}: is being written by another treepack process" in result.err.splitlines()[-1], (
            name,
            result.err,
        )
        result = treepack(*command, "")  # a variable of the shell that is not set
        assert result.status == 1, name
        assert result.err.endswith(f"treepack: {command[-1]} is empty; give a path, or . for this folder\n"), result.err
        refusals = {"http": "http:// is not supported", "hf": "hf:// is read only", "memory": "memory:// ends with"}
        for scheme, fault in refusals.items():
            result = treepack(*command, f"{scheme}://bucket/{name}")
            assert result.status == 1, name
            assert f"{scheme}://bucket/{name}: {fault}" in result.err.splitlines()[-1], (name, result.err)
    with (tmp_path / ".state.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        result = treepack("select", "update", tmp_path / "state", "--rollouts", trie, "--add-groups")
    assert "state: is being written" in result.err
