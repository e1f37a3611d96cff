"""No text of an input, a template, a manifest or a server can drive the terminal."""

from __future__ import annotations

import json
import logging
import re
import shutil
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from support.byte_tokenizer import save
from support.command_line import Run
from support.engine_server import EngineServer, in_thread
from support.manifests import seal
from support.terminal import on_terminal
from support.written_rollouts import write_rollouts

streams = import_module("treepack_cli.streams")

EVIL = "\x1b]0;pwn\x07\x9b8m"
ESCAPED = r"\x1b]0;pwn\x07\x9b8m"
# Bars go to the beginning of their line and up; colours come from tables and `show`.
ALLOWED = re.compile(r"\r|\x1b\[[0-9;]*m|\x1b\[[AK]")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.fixture
def folder(treepack: Run, tmp_path: Path) -> Path:
    """A folder with rollouts.jsonl, trie/, packed/ and a tokenizer."""
    write_rollouts(tmp_path / "rollouts.jsonl")
    save(tmp_path / "tokenizer", "{% for m in messages %}{{ raise_exception(m.content) }}{% endfor %}")
    assert treepack("build-trie", tmp_path / "rollouts.jsonl", "--out", tmp_path / "trie").status == 0
    assert treepack("pack", tmp_path / "trie", "--capacity", 12, "--out", tmp_path / "packed").status == 0
    return tmp_path


def write(path: Path, *records: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def change(source: Path, target: Path, **fields: Any) -> None:
    """Copy a directory, with other fields in its manifest."""
    shutil.copytree(source, target)
    path = target / "manifest.json"
    seal(path, json.loads(path.read_text()) | fields)


def make_inputs(folder: Path) -> dict[str, list[str]]:
    """Write inputs with escape sequences, and return the command for each place."""
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    long = {"id": EVIL, "group_id": EVIL, "tokens": list(range(30)), "loss_mask": [1] * 30}
    write(folder / "field.jsonl", {EVIL: 1})
    write(folder / "role.jsonl", {"messages": [{"role": EVIL, "content": "a"}, *chat["messages"]]})
    write(folder / f"{EVIL}.jsonl", {"tokens": "x"})
    write(folder / "id.jsonl", long)
    write(folder / "raises.jsonl", {"messages": [{"role": "user", "content": EVIL}, *chat["messages"]]})
    change(folder / "trie", folder / "version", version=EVIL)
    change(folder / "trie", folder / "format", format=EVIL)
    shutil.copytree(folder / "tokenizer", folder / EVIL)  # another tokenizer than that of the trie
    change(folder / "trie", folder / "named", tokenizer={"name": EVIL, "sha256": "0" * 64, "vocab_size": 9})
    return {
        "field": ["build-trie", "field.jsonl", "--out", "a"],
        "role": ["build-trie", "role.jsonl", "--tokenizer", "tokenizer", "--out", "b"],
        "file": ["build-trie", f"{EVIL}.jsonl", "--out", "c"],
        "absent": ["stats", f"absent {EVIL}"],
        "build": ["build-trie", "id.jsonl", "--out", "long"],
        "id": ["pack", "long", "--capacity", "12", "--out", "d"],
        "show": ["show", "long", "--trajectory", f"other {EVIL}"],
        "raise_exception": ["build-trie", "raises.jsonl", "--tokenizer", "tokenizer", "--out", "e"],
        "version": ["stats", "version"],
        "format": ["stats", "format"],
        "tokenizer": ["show", "named", "--text"],
        "usage": ["stats", "trie", f"--{EVIL}"],
        "command": [EVIL],
    }


def test_no_place_lets_an_escape_sequence_through(folder: Path) -> None:
    commands = make_inputs(folder)
    outputs = dict(zip(commands, on_terminal(folder, *commands.values()), strict=True))
    for place, output in outputs.items():
        assert CONTROL.search(ALLOWED.sub("", output)) is None, (place, output)
        if place != "build":
            assert ESCAPED in output, (place, output)


@pytest.mark.slow
def test_a_command_that_imports_torch_escapes_too(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": EVIL}))
    (output,) = on_terminal(folder, ["train", "packed", "--model", "model", "--out", "f", "--device", "cpu"])
    assert CONTROL.search(ALLOWED.sub("", output)) is None
    assert ESCAPED in output


class RudeServer(EngineServer):
    """A server whose refusals and versions contain an escape sequence."""

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"error": EVIL}, status=400)


def test_the_words_of_a_server_are_escaped(folder: Path) -> None:
    write(folder / "prompts.jsonl", {"prompt_token_ids": [1, 2]})
    with in_thread(RudeServer()) as url:
        command = ["rollout", "prompts.jsonl", "--engine", url, "--sampler", "independent", "--out", "r.jsonl"]
        (output,) = on_terminal(folder, command)
    assert ESCAPED in output
    assert CONTROL.search(ALLOWED.sub("", output)) is None


def test_a_log_line_and_a_warning_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("somebody")
    with streams.standard_streams():
        handler = logging.StreamHandler(sys.stderr)
        logger.addHandler(handler)
        try:
            logger.error("model %s\r", EVIL)
            sys.stderr.write(warnings.formatwarning(EVIL, UserWarning, "a.py", 1, "x"))
        finally:
            logger.removeHandler(handler)
        sys.stderr.write("\r 12%|###   |\x1b[A")
        sys.stderr.write("\x1b]0;pwn")
    written = capsys.readouterr().err
    assert written.endswith("\r 12%|###   |\x1b[A\\x1b]0;pwn")
    assert CONTROL.search(ALLOWED.sub("", written)) is None
    assert f"model {ESCAPED}\\r\n" in written
    assert f"UserWarning: {ESCAPED}\n" in written


def test_output_into_a_file_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    with streams.standard_streams():
        sys.stdout.write(EVIL)
    assert capsys.readouterr().out == EVIL


@pytest.mark.slow
def test_the_output_does_not_begin_with_an_empty_line_if_the_terminal_has_no_size(folder: Path) -> None:
    built, counted = on_terminal(folder, ["build-trie", "rollouts.jsonl", "--out", "again"], ["stats", "trie"])
    assert built.lstrip("\r").startswith("reading")
    assert counted.lstrip("\r").startswith("planning")
