"""treepack show: its output for rollouts, tries and packed directories, its refusals, and its page in docs."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from support import byte_tokenizer
from support.command_line import Run
from support.manifests import seal
from support.paths import ROOT

SAMPLES = ROOT / "sample_data"
TOKENIZER = SAMPLES / "tokenizer"
COLOUR = re.compile(r"\x1b\[[\d;]*m")
# Clear the screen, set the title, colour the text by an 8-bit code, turn the direction of writing, overwrite the line.
EVIL = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e\r\u4f60\U0001f468\u200d\U0001f469"


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    messages = [{"role": "user", "content": EVIL}, {"role": "assistant", "content": f"no {EVIL}"}]
    record = {"id": f"a{EVIL}", "group_id": f"g{EVIL}", "reward": 1, "messages": messages, "note": EVIL}
    path = tmp_path / "evil.jsonl"
    path.write_text(json.dumps(record) + "\n")
    return path


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("selected", [[], ["--trajectory", f"a{EVIL}"], ["--group", "x"], ["--trajectory", "x"]])
def test_no_rollout_drives_the_terminal(
    treepack: Run, evil: Path, selected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    done = treepack("show", evil, "--tokenizer", TOKENIZER, "--text", *selected)
    assert done.status == (selected[1:] == ["x"])  # unknown names are refused, and the error quotes known ids
    assert "\\x1b[2J" in done.out + done.err
    for line in (COLOUR.sub("", done.out) + done.err).split("\n"):
        assert line.isprintable()
    as_json = treepack("show", evil, "--tokenizer", TOKENIZER, "--text", "--json", *selected).out
    assert as_json.isascii()
    assert as_json.strip().isprintable()


def test_a_rollout_shows_its_temperature_or_the_mean_of_each_turn(treepack: Run, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    rollout = {"id": "a", "input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 0, 1]}
    path.write_text(json.dumps(rollout | {"temperature": 0.7}) + "\n")
    assert "temperature 0.7" in treepack("show", path, "--trajectory", "a").out
    path.write_text(json.dumps(rollout | {"temperatures": [1, 0.5]}) + "\n")
    shown = treepack("show", path, "--trajectory", "a").out
    assert re.findall(r"turn (\d): 1 token, mean temperature ([\d.]+)", shown) == [("1", "1"), ("2", "0.5")]


def test_colours_are_only_for_terminals_that_want_them(treepack: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("show", SAMPLES / "tokens.jsonl", "--group", "estimate-0")
    plain = treepack(*command).out
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = treepack(*command).out
    assert "\x1b[1;32m" in coloured
    assert [line.rstrip() for line in COLOUR.sub("", coloured).splitlines()] == plain.splitlines()
    monkeypatch.setenv("NO_COLOR", "1")
    assert treepack(*command).out == plain


def test_the_marked_text_is_the_answer_of_the_assistant(treepack: Run, tmp_path: Path) -> None:
    answers = [" It is \u4f60\u597d.", "Two\nlines, a \\n and a tab\t."]
    messages = []
    for text in answers:
        messages += [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": text}]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"id": "x", "messages": messages}) + "\n")
    out = treepack("show", path, "--tokenizer", TOKENIZER, "--text", "--trajectory", "x", "--full").out
    marked = [match[1] for line in out.splitlines() if (match := re.match(r" *\d+  \+ (.*)", line))]
    assert marked == ["\\x20It is \u4f60\u597d.<|im_end|>", "Two\\n", "lines, a \\n and a tab\\t.<|im_end|>"]


def test_long_text_loses_its_middle_and_says_how_much(treepack: Run, tmp_path: Path) -> None:
    words = " ".join(f"word{i}" for i in range(400))
    messages = [{"role": "user", "content": words}, {"role": "assistant", "content": "Done."}]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"id": "x", "messages": messages}) + "\n")
    command = ("show", path, "--tokenizer", TOKENIZER, "--text", "--trajectory", "x")
    short, full = treepack(*command).out, treepack(*command, "--full").out
    (left_out,) = re.findall(r"\.\.\. ([\d,]+) tokens \.\.\.", short)
    # 400 words of a small tokenizer are over 1,000 tokens; 64 + 32 of them are shown.
    assert int(left_out.replace(",", "")) > 1000
    assert all(f"word{i}" in full for i in range(400))
    assert "word200" not in short
    assert "+ Done.<|im_end|>" in short


def trie_and_rows(treepack: Run, tmp_path: Path) -> tuple[Path, Path]:
    trie, packed = tmp_path / "trie", tmp_path / "packed"
    chat = (SAMPLES / "chat.jsonl", "--tokenizer", TOKENIZER, "--expand", "turns")
    assert treepack("build-trie", *chat, "--out", trie).status == 0
    assert treepack("pack", trie, "--capacity", 4096, "--method", "contiguous", "--out", packed).status == 0
    return trie, packed


def test_a_missing_id_is_refused_in_one_sentence_that_names_near_ones(treepack: Run, tmp_path: Path) -> None:
    trie, packed = trie_and_rows(treepack, tmp_path)
    tokens = SAMPLES / "tokens.jsonl"
    rows = treepack("stats", packed, "--json").json["num_rows"]
    assert isinstance(rows, int)
    cases: list[tuple[list[object], str]] = [
        ([trie, "--group", "desk-01"], "has no group 'desk-01'; give one of its 8, such as 'desk-001'"),
        ([trie, "--trajectory", "desk-001/0/turn-99"], "such as 'desk-001/0/turn-"),
        ([tokens, "--trajectory", "tokens.jsonl:0"], "give one of its 32, such as 'tokens.jsonl:"),
        ([packed, "--trajectory", "desk-001/0/turn-99"], "such as 'desk-001/0/turn-"),
        ([packed, "--row", rows], f"has no row {rows}; its rows are 0 to {rows - 1}"),
        ([packed, "--row", -1], "has no row -1"),
        ([packed, "--group", "desk-001"], "is packed; give --row or --trajectory, or --group with its trie"),
        ([trie, "--row", 0], "is not packed; give --row with a packed directory"),
        ([tokens, "--text"], "no tokenizer is known, and text needs one; give --tokenizer"),
        ([SAMPLES / "chat.jsonl"], "contains text, not token ids; give --tokenizer NAME"),
        ([tmp_path / "nowhere"], "nowhere"),
    ]
    for arguments, message in cases:
        done = treepack("show", *arguments)
        assert (done.status, done.out, done.err.count("\n")) == (1, "", 1), arguments
        assert message in done.err
    assert treepack("show", trie, "--group", "a", "--row", 1).status == 2


def test_text_of_a_directory_takes_the_tokenizer_it_was_made_with(treepack: Run, tmp_path: Path) -> None:
    trie, packed = trie_and_rows(treepack, tmp_path)
    another = byte_tokenizer.save(tmp_path / "another", byte_tokenizer.PLAIN)
    for path in (trie, packed):
        assert "<|im_start|>system" in treepack("show", path, "--text").out
        other = treepack("show", path, "--text", "--tokenizer", another)
        assert (other.status, "is another tokenizer than" in other.err) == (1, True)
    # The tokenizer of the manifest was moved: --text needs --tokenizer then, and a copy with equal contents will do.
    manifest = json.loads((trie / "manifest.json").read_text())
    manifest["tokenizer"]["name"] = str(tmp_path / "moved")
    seal(trie / "manifest.json", manifest)
    assert "cannot be loaded; give it with --tokenizer" in treepack("show", trie, "--text").err
    assert treepack("show", trie, "--text", "--tokenizer", TOKENIZER).status == 0


def test_text_is_the_default_if_there_is_a_tokenizer(treepack: Run, tmp_path: Path) -> None:
    trie, packed = trie_and_rows(treepack, tmp_path)
    system = "<|im_start|>system"
    for path in (trie, packed, SAMPLES / "chat.jsonl"):
        given = () if path.is_dir() else ("--tokenizer", TOKENIZER)
        assert treepack("show", path, *given).out == treepack("show", path, *given, "--text").out
        assert system in treepack("show", path, *given).out
        assert system not in treepack("show", path, *given, "--ids").out
        assert system not in treepack("show", path, *given, "--json").out
    ids = treepack("show", trie, "--ids").out
    manifest = json.loads((trie / "manifest.json").read_text())
    (tmp_path / "damaged").mkdir()
    for name in ("owner/on-the-hub", str(tmp_path / "damaged")):  # nobody asks the hub
        manifest["tokenizer"]["name"] = name
        seal(trie / "manifest.json", manifest)
        assert treepack("show", trie).out == ids


def test_a_tokenizer_beside_the_data_is_found_from_another_folder(
    treepack: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TOKENIZER, "tokenizer")
    shutil.copy(SAMPLES / "chat.jsonl", "chat.jsonl")
    assert treepack("build-trie", "chat.jsonl", "--tokenizer", "tokenizer", "--out", "trie").status == 0
    text = treepack("show", "trie").out
    assert "<|im_start|>system" in text
    monkeypatch.chdir("elsewhere")
    assert treepack("show", "../trie").out == text


def test_without_a_choice_the_group_of_highest_overlap_is_shown_and_the_others_are_listed(treepack: Run) -> None:
    out = treepack("show", SAMPLES / "tokens.jsonl").out
    assert out.startswith("group_id estimate-2 ")
    listed = re.findall(r"^ *([\d.]+) %  .*  (\S+)$", out, re.MULTILINE)
    assert sorted(name for _, name in listed) == [f"estimate-{i}" for i in range(4)]
    assert [float(por) for por, _ in listed] == sorted((float(por) for por, _ in listed), reverse=True)


def test_a_conversation_names_all_of_its_samples(treepack: Run) -> None:
    chat = (SAMPLES / "chat.jsonl", "--tokenizer", TOKENIZER)
    # The template drops old reasoning, so the conversation became three samples.
    out = treepack("show", *chat, "--trajectory", "desk-005/3").out
    assert re.findall(r"trajectory_id (\S+)", out) == [f"desk-005/3/part-{i}" for i in range(3)]
    samples = treepack("show", *chat, "--trajectory", "desk-005/3", "--json").json["samples"]
    assert isinstance(samples, list)
    assert [sample["trajectory_id"] for sample in samples] == [f"desk-005/3/part-{i}" for i in range(3)]


def test_reused_tokens_of_an_augmented_query_are_not_add_mark(treepack: Run, tmp_path: Path) -> None:
    record = {"id": "q", "prompt_ids": [1, 2], "response_ids": [3, 4, 5], "metadata": {"untrained_prefix": 4}}
    path = tmp_path / "tokens.jsonl"
    path.write_text(json.dumps(record) + "\n")
    out = treepack("show", path, "--trajectory", "q").out
    # The span covers tokens 2 to 4 of five; the prefix of four reused tokens leaves only the last one trained.
    assert '"untrained_prefix": 4' in out
    assert out.endswith("\n0    1 2 3 4\n   + (turn 1: 1 token)\n4  + 5\n")


def test_json_holds_every_token_and_what_is_trained(treepack: Run, tmp_path: Path) -> None:
    trie, packed = trie_and_rows(treepack, tmp_path)
    for arguments in (
        [trie, "--group", "desk-003"],
        [packed, "--row", 1],
        [packed, "--trajectory", "desk-003/1/turn-2"],
    ):
        view: dict[str, Any] = treepack("show", *arguments, "--text", "--json").json
        segments = [segment for node in view["nodes"] for segment in node["segments"]]
        count = sum(len(segment["input_ids"]) for segment in segments)
        assert count == view.get("tokens_tree", view.get("num_tokens"))
        trained = sum(len(segment["input_ids"]) for segment in segments if segment["loss_weight"])
        assert 0 < trained == view.get("tokens_trained", trained)
        assert any(segment["text"].startswith("<|im_start|>system") for segment in segments)


def transcripts() -> list[tuple[str, str]]:
    """Return the commands of the page, each with its output on the page."""
    page = (ROOT / "docs" / "report.md").read_text()
    blocks = re.findall(r"^```text\n(\$ .*?)^```$", page, re.MULTILINE | re.DOTALL)
    # "$ one\nout\n$ two\n" -> ("one", "out\n"), ("two", ""): a command without output is only run
    parts = [part for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    return [(part.partition("\n")[0], part.partition("\n")[2]) for part in parts]


def test_the_page_shows_what_the_commands_print(treepack: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sample_data").symlink_to(SAMPLES)
    monkeypatch.chdir(tmp_path)
    shown_ones = [command for command, expected in transcripts() if expected]
    for command, expected in transcripts():
        line, _, cut = command.partition(" | head -n ")
        done = treepack(*shlex.split(line)[1:])
        assert done.status == 0, done.err
        if expected:
            assert "\n".join(done.out.split("\n")[: int(cut) if cut else None]).rstrip("\n") + "\n" == expected, command
    assert len(shown_ones) >= 3
    (program,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs" / "report.md").read_text(), re.MULTILINE | re.DOTALL
    )
    monkeypatch.setenv("COLUMNS", "80")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program, {})
    expected = treepack("show", "trie", "--group", "estimate-3").out
    assert [line.rstrip() for line in printed.getvalue().splitlines()] == expected.splitlines()
