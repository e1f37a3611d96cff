"""Single files that commands write: only what a command may have written itself is replaced, and only when asked."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import click
import pyarrow as pa
import pytest
from pyarrow import parquet

from support.command_line import Run
from support.paths import SAMPLE_DATA
from support.wrong_inputs import write_inputs
from treepack.errors import TreepackError

output = import_module("treepack_cli.output")

COLUMNS = {"group_id", "value"}


def refusal(out: Path, *, overwrite: bool = True, inputs: list[Path] | None = None) -> str | None:
    try:
        with click.Context(click.Command("test")):
            output.reserve_table(out, [*(inputs or [])], columns=COLUMNS, overwrite=overwrite)
    except TreepackError as error:
        return str(error).replace(str(out), "OUT")
    return None


def test_a_table_of_ours_is_replaced_only_when_asked(tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    assert refusal(out, overwrite=False) is None
    out.write_text('{"group_id": "g", "value": 0.5, "more": 1}\n')
    assert refusal(out) is None
    assert refusal(out, overwrite=False) == "OUT exists; choose another --out or give --overwrite"
    table = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"group_id": ["g"], "value": [0.5]}), table)
    assert refusal(table) is None


@pytest.mark.parametrize(
    "content", ['{"value": 12, "my": "sensor data"}', '"the group_id and the value of this are great"', "[1]", "x"]
)
def test_what_others_wrote_is_never_replaced(tmp_path: Path, content: str) -> None:
    out = tmp_path / "a.jsonl"
    out.write_text(content + "\n")
    assert refusal(out) == "OUT exists and was not written by treepack; remove it yourself or choose another --out"
    state = tmp_path / "state.parquet"
    parquet.write_table(pa.table({"query_id": ["q"], "tried": [3.0]}), state)
    assert refusal(state) is not None


def test_an_output_inside_an_input_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "trie" / "a.jsonl", inputs=[tmp_path / "trie"]) is not None
    assert refusal(tmp_path / "a.jsonl", inputs=[tmp_path / "a.jsonl"]) is not None


WRITERS = (
    "build-trie rollouts.jsonl --out OUT",
    "prepare rollouts.jsonl --out OUT",
    "advantages data/trie --estimator grpo --out OUT",
    "pack data/trie --capacity 64 --out OUT",
    "train data --model m.json --out OUT",
    "logprobs data --model m.json --out OUT",
    "critic data --model critic --out OUT",
    "values fit data --model m.json --out OUT",
    "values predict data --values elsewhere --out OUT.jsonl",
    "rollout rollouts.jsonl --engine m.json --sampler independent --out OUT.jsonl",
    "report rollouts.jsonl --out OUT.html",
    "report rollouts.jsonl --png OUT",
    "augment data --packed data --out OUT.jsonl",
    "allocate prefixes data --predictions rollouts.jsonl --expand 2 --out OUT.jsonl",
    "allocate roots rollouts.jsonl --budget 2 --out OUT.jsonl",
    "select update OUT.parquet --queries rollouts.jsonl",
    "select rollouts.jsonl --k 1 --out OUT.jsonl",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("writers"))


@pytest.mark.parametrize("command", WRITERS)
@pytest.mark.parametrize("owner", ["torn", "run", "predictor"])
def test_no_command_writes_into_a_directory_of_another_one(
    folder: Path, treepack: Run, monkeypatch: pytest.MonkeyPatch, command: str, owner: str
) -> None:
    monkeypatch.chdir(folder)
    before = sorted((folder / owner).rglob("*"))
    done = treepack(*command.replace("OUT", f"{owner}/inner/new").split())
    assert done.status == 1
    assert f"lies inside {folder / owner}, which treepack wrote and which must hold no other files; choose" in done.err
    assert done.err.count("\n") == 1 + done.err.count("note: ")
    assert sorted((folder / owner).rglob("*")) == before


def test_an_output_of_prepare_may_hold_outputs_beside_its_own(folder: Path, treepack: Run) -> None:
    done = treepack("pack", folder / "data" / "trie", "--capacity", "64", "--out", folder / "data" / "packed-64")
    assert done.status == 0, done.err


def test_json_lines_do_not_go_into_a_name_of_parquet(tmp_path: Path) -> None:
    output.refuse_suffix(tmp_path / "a.jsonl")
    with pytest.raises(TreepackError, match=r"is written as JSON lines; let its name end in \.jsonl"):
        output.refuse_suffix(tmp_path / "a.parquet")


def test_cells_are_whole_and_harmless_on_any_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    output.show_table(["name", "value"], [("x" * 90, 1), ("a\tb[red]\x07", None)])
    assert capsys.readouterr().out.splitlines() == [
        " " * 86 + "name  value",
        "x" * 90 + "      1",
        "a\\tb[red]\\x07".rjust(90) + "      -",
    ]


def test_a_file_of_tools_is_read_only_for_rollouts(tmp_path: Path, treepack: Run) -> None:
    (tmp_path / "bad.json").write_text("x")
    tools = ("--tools", tmp_path / "bad.json")
    assert treepack("build-trie", SAMPLE_DATA / "tokens.jsonl", "--out", tmp_path / "trie").status == 0
    assert treepack("stats", tmp_path / "trie", *tools).err.endswith(
        "its rollouts are read already; leave out --tools\n"
    )
    assert treepack("build-trie", SAMPLE_DATA / "tokens.jsonl", *tools).status == 2
    refused = treepack("build-trie", SAMPLE_DATA / "tokens.jsonl", *tools, "--out", tmp_path / "other")
    assert (refused.status, "is not JSON" in refused.err) == (1, True)
    assert not (tmp_path / "other").exists()
