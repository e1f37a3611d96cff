"""Attempts that do not count: failed rollouts of each format that records them, and rejected compactions."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support import law
from support.command_line import Run
from support.paths import ROLLOUTS
from support.readings import read_whole
from treepack import BuildOptions, read_to_trie
from treepack.files.input_files.inputs import list_inputs
from treepack.files.input_files.record_files import read_records
from treepack.files.manifest import read_manifest
from treepack.formats.trainers.verifiers import REJECTED
from treepack.ingest.readers.fields.failures import failure_of
from treepack.ingest.readers.registry import formats_by_name
from treepack.trajectory import Tokens, Trajectory
from treepack.trie.store.trie_files import read_trie

MINI = "run-a/lib__mend-3/lib__mend-3.traj.json"
# A file of the sample of the format, a path of one of its records (* is each element), and values there with the cause;
# "" is a limit that a rollout reached, or an error of the model.
CAUSES: list[tuple[str, str, str, list[tuple[Any, str]]]] = [
    ("verifiers", "verifiers.jsonl", "traces.*.ok", [(False, "ok false")]),
    ("verifiers", "verifiers.jsonl", "ok", [(False, "ok false")]),
    (
        "verifiers-results",
        "results.jsonl",
        "error",
        [
            ("SandboxError('gone')", "SandboxError"),
            ({"error": "ModelError", "error_chain_str": ".."}, "ModelError"),
            ("OverlongPromptError('18 tokens')", ""),
        ],
    ),
    ("verifiers-results", "results.jsonl", "stop_condition", [("has_error", "has_error"), ("max_turns_reached", "")]),
    (
        "slime",
        "slime.json",
        "samples.*.status",
        [("aborted", "aborted"), ("failed", "failed"), ("pending", "pending"), ("truncated", "")],
    ),
    ("skyrl", "generator_output.json", "stop_reasons.*", [("error", "error"), ("abort", "abort"), ("length", "")]),
    (
        "rllm",
        "_0.json",
        "termination_reason",
        [("error", "error"), ("TerminationReason.ERROR", "ERROR"), ("max_turns_exceeded", "")],
    ),
    (
        "harbor-traces",
        "harbor-traces.jsonl",
        "result",
        [
            ("EnvironmentStartTimeoutError", "EnvironmentStartTimeoutError"),
            ("ContextLengthExceededError", ""),
            ("OutputLengthExceededError", ""),
        ],
    ),
    (
        "inspect",
        "t1.json",
        "samples.*.error",
        [
            ({"message": "RuntimeError('gone')", "traceback": ".."}, "RuntimeError"),
            ({"message": "the container is gone"}, "error"),
        ],
    ),
    (
        "tau2",
        "one-file/results.json",
        "simulations.*.termination_reason",
        [
            ("infrastructure_error", "infrastructure_error"),
            ("user_error", "user_error"),
            ("max_steps", ""),
            ("too_many_errors", ""),
        ],
    ),
    ("mint", "results.jsonl", "state.error", [("openai.APIError: gone", "APIError")]),
    ("mint", "results.jsonl", "state.terminate_reason", [("unexpected_error", "unexpected_error"), ("max_steps", "")]),
    (
        "openhands",
        "output.jsonl",
        "error",
        [
            ("RuntimeError: the sandbox is gone", "RuntimeError"),
            ("RuntimeError: Agent reached maximum iteration. Current iteration: 30", ""),
            ("AgentStuckInLoopError: Agent got stuck in a loop", ""),
        ],
    ),
    (
        "swe-agent",
        "run-b/lib__mend-7.traj",
        "info.exit_status",
        [
            ("exit_environment_error", "exit_environment_error"),
            ("submitted (exit_api)", "exit_api"),
            ("submitted (exit_cost)", ""),
        ],
    ),
    (
        "mini-swe-agent",
        MINI,
        "info.exit_status",
        [
            ("TimeoutExpired", "TimeoutExpired"),
            ("APIError", "APIError"),
            ("LimitsExceeded", ""),
            ("ContextWindowExceededError", ""),
        ],
    ),
    ("verifiers", "verifiers.jsonl", "traces.*.stop_condition", [("max_turns", "")]),
]


def put(value: Any, steps: list[str], new: Any) -> None:
    for step in steps[:-1]:
        if step == "*":
            for each in value:
                put(each, steps[steps.index("*") + 1 :], new)
            return
        value = value[step]
    if steps[-1] == "*":
        value[:] = [new] * len(value)
    else:
        value[steps[-1]] = new


def causes(name: str, file: str, path: str, value: Any) -> list[str]:
    """The cause of each trajectory of a sample whose records have `value` at `path`."""
    (sample,) = (each for each in ROLLOUTS.iterdir() if each.name.partition(".")[0] == name)
    (chosen,) = (each for each in list_inputs([sample])[0] if str(each).endswith(file))
    records = []
    for record in read_records(chosen):
        edited = copy.deepcopy(record.value)
        put(edited, path.split("."), value)
        records.append(replace(record, value=edited))
    return [item.failed for item in law.read(records).items if isinstance(item, Trajectory)]


@pytest.mark.parametrize(("name", "file", "path", "found"), CAUSES)
def test_a_rollout_names_the_cause_of_its_failure(
    name: str, file: str, path: str, found: list[tuple[Any, str]]
) -> None:
    for value, cause in found:
        assert set(causes(name, file, path, value)) == {cause}, value


def test_each_format_with_a_mark_of_failure_is_tried() -> None:
    declared = {name for name, form in formats_by_name().items() if form.failed}
    assert declared == {name for name, *_ in CAUSES} | {"atif"}  # its exceptions are in another file


@pytest.mark.parametrize(
    ("fields", "marks", "cause"),
    [
        ({"ok": False, "errors": [{"type": "First"}, {"type": "SandboxError"}]}, "errors ok", "SandboxError"),
        ({"ok": False, "errors": [{"type": "Docker", "message": "x" * 400}]}, "errors ok", "Docker"),
        ({"ok": False, "errors": []}, "errors ok", "ok false"),
        ({"ok": False, "errors": [{"type": "OverlongPromptError"}]}, "errors ok", "ok false"),
        ({"errors": [{"type": "BadRequestError", "message": "maximum context length is 8 tokens"}]}, "errors", ""),
        ({"error": {"code": 7}}, "error", "error"),
        ({"error": {"type": ["x"], "message": 3}}, "error", "error"),
        ({"error": "", "errors": None, "ok": None}, "error errors ok", ""),
        ({"status": 7, "ok": 0}, "status ok", ""),
    ],
)
def test_the_cause_of_a_failure(fields: dict[str, Any], marks: str, cause: str) -> None:
    assert failure_of(fields, marks.split()) == (cause, ())


def trace(name: str, reward: float, **fields: Any) -> dict[str, Any]:
    def node(parent: int | None, ids: list[int], *, sampled: bool = False, **more: Any) -> dict[str, Any]:
        message = {"role": "assistant" if sampled else "user", "content": str(ids)}
        root = {} if parent is None else {"parent": parent}
        return root | {"message": message, "sampled": sampled, "token_ids": ids, "mask": [sampled] * len(ids)} | more

    def edge(kind: str, origin: Any) -> list[dict[str, Any]]:
        return [{"type": kind, "node": origin}]

    nodes = [
        node(None, [1, 2]),
        node(0, [3, 4]),
        node(1, [5, 6], sampled=True),
        node(2, [7]),
        node(3, [50, 51], sampled=True, semantic_parents=edge("compaction_attempt", 2)),
        node(3, [60, 61], sampled=True, semantic_parents=edge("compaction_attempt", 2)),
        node(0, [8, 9]),
        node(6, [70, 71], sampled=True, semantic_parents=edge("compaction", 5)),
    ]
    rewards = {"solved": {"score": reward, "weight": 1.0}}
    one = {"id": name, "task": {"key": "k"}, "agent": {"name": "agent"}, "rewards": rewards, "nodes": nodes}
    return {"id": name, "env": {"id": "v"}, "task": {"key": "k"}, "traces": [one | {"ok": True, "errors": []} | fields]}


def test_a_compaction_that_no_node_continues_is_not_trained(tmp_path: Path) -> None:
    (tmp_path / "traces.jsonl").write_text(json.dumps(trace("t", 1.0)))
    trie, log = read_to_trie([tmp_path / "traces.jsonl"])
    assert trie.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 60, 61, 8, 9, 70, 71]
    assert log.counts[f"skipped: {REJECTED}"] == 1
    # Nodes after an attempt continue it, and an edge to no node accepts nothing.
    value = trace("t", 1.0)
    nodes = value["traces"][0]["nodes"]
    nodes[7]["semantic_parents"][0]["node"] = [5]
    nodes += [{**nodes[3], "parent": 4}, {**nodes[2], "parent": 8}]
    items = [item for item in read_whole("verifiers", value) if isinstance(item, Trajectory)]
    assert all(isinstance(item.content, Tokens) for item in items)
    trained = {token for item in items for token in item.content.tokens.tolist()}  # type: ignore[union-attr]
    assert {50, 51} <= trained
    assert {60, 61}.isdisjoint(trained)


ERRORS = [{"type": "SandboxError", "message": "gone"}]


def test_failed_rollouts_are_in_no_group_and_are_counted_by_cause(tmp_path: Path, treepack: Run) -> None:
    values = [
        trace("a", 1.0),
        trace("b", 0.0),
        trace("c", 0.0, ok=False, errors=ERRORS, stop_condition="error"),
        trace("d", 0.0, ok=False),
        trace("e", 1.0, errors=ERRORS),
    ]
    rollouts = tmp_path / "traces.jsonl"
    rollouts.write_text("\n".join(map(json.dumps, values)))
    built = treepack("build-trie", rollouts, "--out", tmp_path / "trie")
    assert built.status == 0, built.err
    assert "failed rollout (SandboxError)" in built.out
    assert "errors of a rollout that is ok, kept" in built.out
    assert manifest_reasons(tmp_path / "trie") == {"SandboxError": 1, "ok false": 1}
    assert advantages(tmp_path / "trie", treepack) == pytest.approx({"a": 1 / 3, "b": -2 / 3, "e": 1 / 3})
    kept = treepack("build-trie", rollouts, "--failed", "keep", "--out", tmp_path / "all")
    assert "failed rollout" not in kept.out
    assert manifest_reasons(tmp_path / "all") == {}
    expected = {"a": 0.6, "b": -0.4, "c": -0.4, "d": -0.4, "e": 0.6}
    assert advantages(tmp_path / "all", treepack) == pytest.approx(expected)
    assert read_manifest(tmp_path / "all")["options"]["failed"] == "keep"
    # The function reads as the command does, and the packed rows have the same trajectories.
    assert read_to_trie([rollouts])[0].trajectories.num_rows == 6
    assert read_to_trie([rollouts], BuildOptions(failed="keep"))[0].trajectories.num_rows == 10
    assert treepack("pack", tmp_path / "trie-scored", "--out", tmp_path / "packed").status == 0
    stats = treepack("stats", tmp_path / "packed", "--json").json
    assert stats["num_trajectories"] == 6
    assert treepack("stats", rollouts, "--failed", "keep", "--json").json["num_trajectories"] == 10
    refused = treepack("build-trie", rollouts, "--strict", "--out", tmp_path / "strict")
    assert refused.status == 1
    assert "traces.jsonl:3: failed rollout (SandboxError); --failed keep trains it" in refused.err


def manifest_reasons(directory: Path) -> dict[str, int]:
    counts = read_manifest(directory)["counts"]
    return {name[25:-1]: number for name, number in counts.items() if name.startswith("skipped: failed rollout (")}


def advantages(trie: Path, treepack: Run) -> dict[str, float]:
    scored = Path(f"{trie}-scored")
    assert treepack("advantages", trie, "--estimator", "dr-grpo", "--out", scored).status == 0
    rows = read_trie(scored).trajectories.select(["rollout_id", "advantage"]).to_pylist()
    return {row["rollout_id"]: row["advantage"] for row in rows}
