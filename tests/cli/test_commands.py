"""The command line through its installed entry point: results, refusals, exit status, and the imports of help."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest

from support.command_line import Run
from support.manifests import seal
from support.paths import ROOT, SAMPLE_DATA
from support.written_rollouts import write_rollouts
from treepack.pack.options import EFFORTS, NORMALIZE, SEMANTICS, TOO_LONG
from treepack.pack.plan.planning import FOREST_METHODS, GROUPS, METHODS

SAMPLES = SAMPLE_DATA
TREEPACK = Path(sys.executable).parent / "treepack"
KEYS = {"kind", "num_trajectories", "num_groups", "num_trees", "num_nodes", "tokens_flat", "tokens_tree", "por"}
PACKED_KEYS = {
    "capacity",
    "num_rows",
    "tokens_packed",
    "err",
    "token_ratio",
    "fill",
    "lower_bound",
    "gap",
    "pairs_max_over_mean",
}


@pytest.fixture
def trie(treepack: Run, tmp_path: Path) -> Path:
    out = tmp_path / "trie"
    assert treepack("build-trie", write_rollouts(tmp_path / "rollouts.jsonl"), "--out", out).status == 0
    return out


@pytest.fixture
def packed(treepack: Run, trie: Path, tmp_path: Path) -> Path:
    out = tmp_path / "packed"
    assert treepack("pack", trie, "--capacity", 12, "--out", out).status == 0
    return out


def imported_by(*commands: Sequence[str | Path]) -> set[str]:
    """Top-level modules that commands, run one after the other in a fresh process, have imported when they end."""
    script = (
        "import sys\nfrom treepack_cli import main\n"
        f"for arguments in {[[str(word) for word in command] for command in commands]!r}:\n"
        "    sys.argv = ['treepack', *arguments]\n"
        "    try:\n        main()\n"
        "    except SystemExit as stop:\n        assert not stop.code, arguments\n"
        "print('MODULES', *sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("MODULES")[2].split())


def test_help_imports_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "numpy", "pyarrow", "polars", "ortools", "tqdm", "rich"}
    assert imported_by(["--help"]) & heavy == set()


def test_help_of_each_command_imports_no_numerical_library() -> None:
    names = import_module("treepack_cli").SUMMARIES
    assert names.keys() >= {"build-trie", "pack", "stats", "train"}
    numerical = {"torch", "numpy", "pyarrow", "polars"}
    assert imported_by(*([name, "--help"] for name in names)) & numerical == set()


def test_every_command_has_its_line_in_the_list(treepack: Run) -> None:
    group = import_module("treepack_cli").commands
    files = {path.stem for path in (ROOT / "cli").glob("*.py")}
    for name in group.list_commands(None):
        assert group.get_command(None, name).name == name
        assert name.replace("-", "_") in files
    assert group.get_command(None, "nothing") is None
    assert treepack("nothing").status == 2


def test_the_data_half_imports_no_torch(trie: Path, packed: Path, tmp_path: Path) -> None:
    rollouts = write_rollouts(tmp_path / "more.jsonl")
    imported = imported_by(
        ("build-trie", rollouts, "--out", tmp_path / "again"),
        ("pack", trie, "--capacity", "12", "--out", tmp_path / "again-packed"),
        ("stats", packed, "--check"),
        ("models", "qwen3-8b"),
        ("stats", rollouts),
        ("show", rollouts),
    )
    assert imported & {"torch", "transformers"} == set()
    assert "pyarrow" in imported


def test_summary_of_build_trie(treepack: Run, tmp_path: Path) -> None:
    path = write_rollouts(tmp_path / "rollouts.jsonl")
    with path.open("a") as file:
        file.write('{"input_ids": [], "loss_mask": []}\n{"input_ids": [1, 2], "loss_mask": [0, 0]}\n')
    result = treepack("build-trie", path, "--out", tmp_path / "trie")
    lines = [line.split(maxsplit=2) for line in result.out.splitlines()]
    values = {words[0]: words[1] for words in lines[2:12]}
    assert result.out.splitlines()[1] == "6 trajectories of token ids or plain text"
    assert float(values.pop("tokens_per_second").replace(",", "")) > 0
    assert values == {
        "num_files": "1",
        "num_trajectories": "6",
        "num_groups": "2",
        "num_trees": "1",
        "num_nodes": "7",
        "tokens_trained": "18",
        "tokens_flat": "30",
        "tokens_tree": "15",
        "por": "50.0",
    }
    assert "- skipped: empty trajectory: 1" in result.out.splitlines()
    assert "- skipped: no trained token: 1" in result.out.splitlines()


def test_results_go_to_stdout_and_the_end_to_stderr(treepack: Run, tmp_path: Path) -> None:
    out = tmp_path / "my trie"
    result = treepack("build-trie", write_rollouts(tmp_path / "r.jsonl"), "--out", out)
    assert (result.status, result.err) == (0, f"written {out}\nnext: treepack pack '{out}' --out PACKED\n")


def test_stats_of_rollouts_trie_and_packed(treepack: Run, trie: Path, packed: Path, tmp_path: Path) -> None:
    raw, built, rows = (treepack("stats", path, "--json").json for path in (tmp_path / "rollouts.jsonl", trie, packed))
    assert [raw["kind"], built["kind"], rows["kind"]] == ["trajectories", "trie", "packed"]
    assert raw | {"kind": ""} == built | {"kind": ""}
    assert raw.keys() >= KEYS
    assert rows.keys() >= KEYS | PACKED_KEYS


def test_stats_prints_tables(treepack: Run, trie: Path) -> None:
    lines = treepack("stats", trie, "--capacity", "12").out.splitlines()
    assert lines[0] == "6 trajectories of token ids or plain text"
    assert lines[1].startswith("Tree training pays 1.6x in rows of 12 tokens against each trajectory alone")
    assert lines[4].split()[:5] == ["12*", "2", "18", "40.0", "%"]
    out = treepack("stats", trie, "--capacity", "12", "--verbose").out
    assert "por" in out
    assert "50.0 %" in out
    assert "0-256" in out


def test_check_says_when_there_is_no_trie(treepack: Run, trie: Path, packed: Path) -> None:
    trie.rename(trie.with_name("moved"))
    lines = treepack("stats", packed, "--check").out.splitlines()
    assert "not compared with a trie" in lines[-2]
    assert lines[-1].endswith(": all correct")  # the verdict is last
    result = treepack("stats", packed, "--check", "--trie", trie.with_name("moved"))
    assert "not compared" not in result.out


def test_check_refuses_another_trie(treepack: Run, packed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    treepack("build-trie", write_rollouts(tmp_path / "fewer.jsonl", num=2), "--out", other)
    result = treepack("stats", packed, "--check", "--trie", other)
    assert result.status == 1
    assert "is not the trie that" in result.err


def test_an_error_is_one_sentence_and_status_1(treepack: Run, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"input_ids": [1, 2], "loss_mask": [0, 1]}\n{"input_ids": [1, \n')
    result = treepack("build-trie", path, "--out", tmp_path / "trie")
    assert result.status == 1
    assert result.out == ""
    assert len(result.err.splitlines()) == 1
    assert "bad.jsonl:2: malformed JSON" in result.err
    assert not (tmp_path / "trie").exists()


def test_sequences_packed_without_sharing_are_checked_as_such(treepack: Run, trie: Path, tmp_path: Path) -> None:
    out = tmp_path / "flat"
    assert treepack("pack", trie, "--capacity", 12, "--method", "sequence", "--out", out).status == 0
    report = treepack("stats", out, "--check", "--json").json
    assert [report[name] for name in ("tokens_packed", "tokens_flat", "tokens_tree")] == [30, 30, 15]
    checked = {"num_rows": 3, "tokens_packed": 30, "num_trajectories": 6, "tokens_flat": 30}
    assert report["checked"] == checked | {"against_trie": True}
    predicted = treepack("stats", trie, "--capacity", 12, "--method", "sequence", "--json").json["predicted"]
    assert predicted == [{name: report[name] for name in PACKED_KEYS} | {"num_too_long": 0}]


def test_what_shares_no_token_cannot_count_shared_ones_once(treepack: Run, trie: Path, tmp_path: Path) -> None:
    options = ("--method", "sequence", "--semantics", "once")
    refused = treepack("pack", trie, "--capacity", 12, *options, "--out", tmp_path / "flat")
    assert refused.status == 2
    assert "the method sequence shares no token" in refused.err


def test_choices_are_those_of_the_library() -> None:
    group = import_module("treepack_cli").commands

    def choices(command: str, option: str) -> list[str]:
        (parameter,) = (p for p in group.get_command(None, command).params if f"--{option}" in p.opts)
        return list(parameter.type.choices)

    assert choices("stats", "method") == choices("pack", "method") == [*METHODS, *FOREST_METHODS, GROUPS]
    assert choices("stats", "effort") == choices("pack", "effort") == list(EFFORTS)
    assert choices("pack", "too-long") == list(TOO_LONG)
    assert choices("pack", "semantics") == list(SEMANTICS)
    assert choices("pack", "normalize") == list(NORMALIZE)


@pytest.mark.parametrize("which", ["trie", "packed"])
def test_parts_of_an_unfinished_directory_are_not_read_as_rollouts(
    treepack: Run, trie: Path, packed: Path, which: str, tmp_path: Path
) -> None:
    directory = {"trie": trie, "packed": packed}[which]
    (directory / "manifest.json").unlink()
    for command in (("stats", directory), ("build-trie", directory, "--out", tmp_path / "new", "--train-all")):
        result = treepack(*command)
        assert result.status == 1
        assert "is a part of a trie or packed directory" in result.err


def test_wrong_usage_is_status_2(treepack: Run, trie: Path, tmp_path: Path) -> None:
    assert treepack("pack", trie).status == 2
    assert treepack("pack", trie, "--capacity", 0, "--out", tmp_path / "p").status == 2
    assert treepack("stats", trie, "--capacity", "8192,x").status == 2
    for options in (("--time-limit", "nan"), ("--pairs-budget", 10**30), ("--capacity", 2**31)):
        assert treepack("pack", trie, "--capacity", 12, *options, "--out", tmp_path / "p").status == 2
    assert treepack("stats", trie, "--capacity", 2**31).status == 2


def test_existing_output_is_refused_unless_overwritten(treepack: Run, trie: Path, packed: Path, tmp_path: Path) -> None:
    rollouts = tmp_path / "rollouts.jsonl"
    before = (trie / "manifest.json").read_bytes()
    for arguments in (("build-trie", rollouts, "--out", trie), ("pack", trie, "--capacity", 12, "--out", packed)):
        refused = treepack(*arguments)
        assert refused.status == 1
        assert "exists; choose another --out or give --overwrite" in refused.err
    assert (trie / "manifest.json").read_bytes() == before
    assert treepack("build-trie", rollouts, "--out", trie, "--overwrite").status == 0


def test_overwrite_spares_what_is_not_ours(treepack: Run, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train.json", "manifest.json"):
        (data / name).write_text('{"input_ids": [1, 2], "loss_mask": [0, 1]}')
    result = treepack("build-trie", data, "--out", data, "--overwrite")
    assert result.status == 1
    assert "was not written by treepack" in result.err
    assert len(list(data.iterdir())) == 2


def test_overwrite_spares_the_input(treepack: Run, trie: Path, tmp_path: Path) -> None:
    before = (trie / "manifest.json").read_bytes()
    result = treepack("pack", trie, "--capacity", 12, "--out", trie, "--overwrite")
    assert result.status == 1
    assert f"{trie} holds the input {trie}, which --overwrite would remove" in result.err
    inside = write_rollouts(trie / "rollouts.jsonl")
    assert treepack("build-trie", inside, "--out", trie, "--overwrite").status == 1
    assert (trie / "manifest.json").read_bytes() == before


def test_overwrite_through_a_link_replaces_what_it_points_to(treepack: Run, trie: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(trie)
    fewer = write_rollouts(tmp_path / "fewer.jsonl", num=2)
    assert treepack("build-trie", fewer, "--out", link, "--overwrite").status == 0
    assert link.is_symlink()
    assert treepack("stats", trie, "--json").json["num_trajectories"] == 2
    assert {path.name for path in tmp_path.iterdir()} == {"rollouts.jsonl", "fewer.jsonl", "trie", "link"}


def entries(value: object, prefix: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Paths of all entries of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, inner in items for path in [(*prefix, key), *entries(inner, (*prefix, key))]]


@pytest.mark.parametrize("which", [pytest.param("trie", marks=pytest.mark.slow), "packed"])
def test_a_damaged_manifest_is_one_sentence_whatever_the_damage(
    treepack: Run, trie: Path, packed: Path, which: str
) -> None:
    directory = {"trie": trie, "packed": packed}[which]
    path = directory / "manifest.json"
    good = path.read_text()
    damages: list[object] = ["delete", None, 5, "x", [], {}]
    for number, place in enumerate(entries(json.loads(good))):
        for damage in damages[number % 2 :: 2]:  # neighbours have the same kinds of values
            manifest = json.loads(good)
            holder = manifest
            for key in place[:-1]:
                holder = holder[key]
            if damage == "delete":
                del holder[place[-1]]
            else:
                holder[place[-1]] = damage
            seal(path, manifest)
            result = treepack("stats", directory, "--check", "--json")
            if result.status:
                assert (result.status, len(result.err.splitlines())) == (1, 1), (place, damage, result.err)
            else:
                json.loads(result.out)
    path.write_text(good)
    assert treepack("stats", directory, "--check").status == 0


def test_a_missing_trie_for_the_check_is_one_sentence(treepack: Run, packed: Path, tmp_path: Path) -> None:
    for other in (tmp_path / "nowhere", tmp_path / "rollouts.jsonl"):
        result = treepack("stats", packed, "--check", "--trie", other)
        assert (result.status, len(result.err.splitlines())) == (1, 1)


def test_too_long(treepack: Run, trie: Path, tmp_path: Path) -> None:
    refused = treepack("pack", trie, "--capacity", 4, "--out", tmp_path / "a")
    assert refused.status == 1
    assert "trajectory r0 has 5 tokens, capacity is 4 (6 such in total)" in refused.err
    cut = treepack("pack", trie, "--capacity", 4, "--out", tmp_path / "b", "--too-long", "truncate")
    assert "truncated to the capacity" in cut.out
    dropped = treepack("pack", trie, "--capacity", 4, "--out", tmp_path / "c", "--too-long", "drop")
    assert dropped.status == 1
    assert "no trajectory fits the capacity of 4" in dropped.err
    assert treepack("stats", tmp_path / "b", "--check").status == 0


@pytest.mark.parametrize(("num_long", "share"), [(1, None), (2, "2 of 12 trajectories (16.7 %)")])
def test_many_dropped_trajectories_are_a_note(treepack: Run, tmp_path: Path, num_long: int, share: str | None) -> None:
    lengths = [9] * num_long + [3] * 10
    records = [{"input_ids": [i, *range(20, 19 + n)], "loss_mask": [0] + [1] * (n - 1)} for i, n in enumerate(lengths)]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    note = f"note: {share} are longer than --capacity and were dropped; give a larger one"
    assert treepack("build-trie", tmp_path / "r.jsonl", "--out", tmp_path / "trie").status == 0
    for command, source in (("pack", "trie"), ("prepare", "r.jsonl")):
        limits = ("--capacity", 4, "--too-long", "drop")
        done = treepack(command, tmp_path / source, *limits, "--out", tmp_path / f"{command}-out")
        assert done.status == 0, done.err
        assert (note in done.err.splitlines()) == (share is not None)


def test_standard_input(tmp_path: Path) -> None:
    data = write_rollouts(tmp_path / "r.jsonl").read_bytes()
    command: list[str | Path] = [TREEPACK, "build-trie", "-", "--out", tmp_path / "trie"]
    done = subprocess.run(command, input=data, capture_output=True, check=True)
    assert b"POR" in done.stdout


def test_same_input_same_bytes_whatever_the_order(treepack: Run, tmp_path: Path) -> None:
    path = write_rollouts(tmp_path / "rollouts.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    for name in ("a", "b"):
        treepack("build-trie", path, "--out", tmp_path / name)
    first, second = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("a", "b"))
    assert first == second
    halves = [tmp_path / "x.jsonl", tmp_path / "y.jsonl"]
    halves[0].write_text("".join(lines[:3]))
    halves[1].write_text("".join(lines[3:]))
    for name, order in (("c", halves), ("d", halves[::-1])):
        treepack("build-trie", *order, "--out", tmp_path / name)
    third, fourth = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("c", "d"))
    assert third == fourth
    assert first["nodes-00000.parquet"] == third["nodes-00000.parquet"]


# With a buffer the write fails at the end of the command, whatever it is; without one, inside it.
@pytest.mark.parametrize(
    ("command", "unbuffered"),
    [(["--help"], "1"), (["formats"], "1"), (["stats", "TRIE"], "1"), (["show", "TRIE", "--help"], "")],
)
def test_a_stdout_that_cannot_be_written_is_one_sentence(trie: Path, command: list[str], unbuffered: str) -> None:
    words = [str(trie) if word == "TRIE" else word for word in command]
    with Path("/dev/full").open("w") as full:
        failed = subprocess.run(
            [TREEPACK, *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert failed.returncode == 1
    (line,) = failed.stderr.splitlines()
    assert line.startswith("treepack: standard output: cannot be written (No space left on device); ")


def test_ids_that_several_trajectories_have_are_counted(treepack: Run, tmp_path: Path) -> None:
    first = write_rollouts(tmp_path / "a.jsonl")
    second = tmp_path / "b.jsonl"
    second.write_text(first.read_text() + "\n")  # other bytes: a copy would be read once
    alone = treepack("build-trie", first, "--out", tmp_path / "one")
    assert "several trajectories have" not in alone.out
    count = int(re.search(r"num_trajectories +(\d+)", alone.out)[1])  # type: ignore[index]
    for options in ([], ["--memory", "1"], ["--workers", "2"]):
        both = treepack("build-trie", first, second, "--out", tmp_path / "two", "--overwrite", *options)
        assert f"id that several trajectories have, followed by @ and the source: {2 * count}" in both.out


def test_a_full_disk_is_one_sentence_and_leaves_nothing(treepack: Run, trie: Path, tmp_path: Path) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))

    command: list[str | Path] = ["pack", trie, "--capacity", "12", "--out", tmp_path / "packed"]
    failed = subprocess.run([TREEPACK, *command], preexec_fn=limit, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "packed: cannot be written" in failed.stderr
    assert len(failed.stderr.splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"rollouts.jsonl", "trie"}
    assert treepack(*command).status == 0


def test_chat_of_the_sample_data(treepack: Run, tmp_path: Path) -> None:
    arguments = (SAMPLES / "chat.jsonl", "--tokenizer", SAMPLES / "tokenizer")
    whole = treepack("stats", *arguments, "--json").json
    turns = treepack("stats", *arguments, "--json", "--expand", "turns").json
    assert whole["num_groups"] == turns["num_groups"] == 8
    assert isinstance(whole["por"], float)
    assert isinstance(turns["por"], float)
    assert 0.3 < whole["por"] < turns["por"] > 0.9
