"""The chat template of data: its entry in manifests, and every way in which a saved tokenizer can hold another one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from support.byte_tokenizer import PLAIN, STRIPPING, save
from support.command_line import Run
from support.paths import SAMPLE_DATA
from treepack import BuildOptions, TreepackError, build_trie_directory, pack_trie
from treepack.data.packed_header import join_manifests, read_header, shared_origin
from treepack.files.manifest import read_manifest, write_manifest
from treepack.files.manifest_entries import TemplateEntry
from treepack.report.live.step_rows import open_run_rows
from treepack.tokenise.file_tokenizer import read_folder
from treepack.tokenise.saved_template import is_template_of, template_entry, tokenizer_of, write_template
from treepack.tokenise.template.forms import PROBE_TOOL
from treepack.tokenise.template.rendering import read_template

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
NEW = PLAIN.replace("tools\n", "functions\n")
ONE: TemplateEntry = {"name": "new.jinja", "sha256": "", "text": NEW}
TWO: TemplateEntry = {"name": "two", "sha256": "", "text": {"default": NEW, "tool_use": PLAIN + "{# é #}"}}
NAMED = {"default": PLAIN, "tool_use": STRIPPING, "rag": "{{ 1 }}"}


def in_config(folder: Path, value: Any, **files: str) -> None:
    """Save a tokenizer whose template is in tokenizer_config.json, as older versions of transformers did."""
    save(folder, None)
    for name, text in files.items():
        (folder / f"chat_template.{name}").write_text(text)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"unknown_field": 1e-3, **json.loads(path.read_text()), "chat_template": value}))


def listed(value: dict[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "template": text} for name, text in value.items()]


HOLDERS: dict[str, Callable[[Path], object]] = {
    "none": lambda folder: save(folder, None),
    "file": lambda folder: save(folder, PLAIN),
    "files": lambda folder: save(folder, NAMED),  # type: ignore[arg-type]
    "config": lambda folder: in_config(folder, PLAIN),
    "list in the config": lambda folder: in_config(folder, listed(NAMED)),
    "both": lambda folder: in_config(folder, PLAIN, jinja=""),
    "old processor": lambda folder: in_config(folder, PLAIN, json=json.dumps({"chat_template": PLAIN})),
}


@pytest.mark.parametrize("entry", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_saved_tokenizer_renders_as_the_data_wherever_it_has_its_template(
    holder: str, entry: TemplateEntry, tmp_path: Path
) -> None:
    HOLDERS[holder](tmp_path)
    write_template(tmp_path, entry)
    texts = entry["text"] if isinstance(entry["text"], dict) else {"default": entry["text"]}
    load: Any = AutoTokenizer.from_pretrained
    for tokenizer in (load(tmp_path), read_folder(tmp_path, "x")):
        if tokenizer is None:  # of unknown_field, which only transformers reads
            continue
        assert tokenizer.get_chat_template() == texts["default"]
        assert tokenizer.get_chat_template(tools=[PROBE_TOOL]) == texts.get("tool_use", texts["default"])
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert ("chat_template" in config) == ("config" in holder or holder in ("both", "old processor"))
    assert config.get("unknown_field", 1e-3) == 1e-3
    assert not (tmp_path / "chat_template.json").exists()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    write_template(tmp_path, entry)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_every_other_byte_of_the_configuration_stays(tmp_path: Path) -> None:
    save(tmp_path, None)
    path, form = tmp_path / "tokenizer_config.json", '{{ "x":1e-06,\r\n\t"chat_template" :{},"\u00e9": [1 ] }}'
    for entry, value in ((ONE, NEW), (TWO, listed(TWO["text"]))):  # type: ignore[arg-type]
        path.write_bytes(form.format(json.dumps(PLAIN)).encode())
        write_template(tmp_path, entry)
        assert path.read_bytes() == form.format(json.dumps(value)).encode()


def test_the_template_that_rendered_is_in_trie_and_rows_and_follows_them(tmp_path: Path) -> None:
    rollouts, file = tmp_path / "r.jsonl", tmp_path / "new.jinja"
    rollouts.write_text(json.dumps(CHAT))
    file.write_text(NEW)
    tokenizers = {"one": save(tmp_path / "one", PLAIN), "two": save(tmp_path / "two", NAMED)}  # type: ignore[arg-type]
    entries = {}
    for name, options in {
        "one": BuildOptions(tokenizer=tokenizers["one"]),
        "two": BuildOptions(tokenizer=tokenizers["two"]),
        "file": BuildOptions(tokenizer=tokenizers["two"], chat_template=str(file)),
    }.items():
        build_trie_directory(rollouts, tmp_path / f"trie-{name}", options)
        pack_trie(tmp_path / f"trie-{name}", tmp_path / f"packed-{name}")
        manifests = [read_manifest(tmp_path / f"{kind}-{name}") for kind in ("trie", "packed")]
        entries[name] = manifests[0]["chat_template"]
        assert manifests[1]["chat_template"] == entries[name]
        assert tokenizer_of(manifests[1], None, where="x").chat_template == entries[name]["text"]
    assert [entry["name"] for entry in entries.values()] == [tokenizers["one"], tokenizers["two"], "new.jinja"]
    assert [entry["text"] for entry in entries.values()] == [PLAIN, {k: NAMED[k] for k in ("default", "tool_use")}, NEW]
    assert entries["file"]["sha256"] == read_template(str(file)).sha256
    assert len({entry["sha256"] for entry in entries.values()}) == 3
    headers = [read_header(tmp_path / f"packed-{name}") for name in entries]
    assert join_manifests([headers[0], headers[0]])["chat_template"] == entries["one"]
    with pytest.raises(TreepackError, match=r"file: was made with the chat template new.jinja .* and .*packed-one"):
        join_manifests([headers[0], headers[2]])


def test_data_of_token_ids_has_no_template_and_trains_with_any(tmp_path: Path) -> None:
    chats, ids, tokenizer = tmp_path / "chat.jsonl", tmp_path / "ids.jsonl", save(tmp_path / "tokenizer", PLAIN)
    chats.write_text(json.dumps(CHAT))
    ids.write_text(json.dumps({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}))
    for path in (chats, ids):
        build_trie_directory(path, tmp_path / path.stem, BuildOptions(tokenizer=tokenizer))
        pack_trie(tmp_path / path.stem, tmp_path / f"{path.stem}-packed")
    headers = [read_header(tmp_path / f"{name}-packed") for name in ("ids", "chat")]
    assert "chat_template" not in headers[0].manifest
    assert shared_origin(headers)["chat_template"] == headers[1].manifest["chat_template"]


@pytest.mark.parametrize("workers", [1, 2])
def test_data_of_token_ids_has_the_template_that_is_given(tmp_path: Path, treepack: Run, workers: int) -> None:
    ids, file = tmp_path / "ids.jsonl", tmp_path / "new.jinja"
    ids.write_text(json.dumps({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}))
    file.write_text(NEW)
    done = treepack("build-trie", ids, "--chat-template", file, "--workers", workers, "--out", tmp_path / "trie")
    assert done.status == 0, done.err
    pack_trie(tmp_path / "trie", tmp_path / "packed")
    entry = {"name": "new.jinja", "sha256": read_template(str(file)).sha256, "text": NEW}
    assert [read_manifest(tmp_path / name).get("chat_template") for name in ("trie", "packed")] == [entry, entry]
    file.write_text("{% for")
    done = treepack("build-trie", ids, "--chat-template", file, "--out", tmp_path / "other")
    assert (done.status, "new.jinja" in done.err, (tmp_path / "other").exists()) == (1, True, False)


def test_paths_of_a_manifest_and_a_run_are_found_from_any_folder(
    tmp_path: Path, treepack: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, training, looking = (tmp_path / name for name in ("project", "training", "looking"))
    for folder in (project, training, looking):
        folder.mkdir()
    monkeypatch.chdir(project)
    save(project / "tokenizer", PLAIN)
    (project / "chat.jsonl").write_text(json.dumps(CHAT) + "\n")
    assert treepack("prepare", "chat.jsonl", "--tokenizer", "tokenizer", "--out", "data").status == 0
    monkeypatch.chdir(training)
    model = SAMPLE_DATA / "tiny-qwen3.json"
    command = ("train", "../project/data", "--model", model, "--steps", 1, "--dtype", "fp32", "--out", "out/run")
    trained = treepack(*command)
    assert trained.status == 0, trained.err
    assert "no tokenizer is saved" not in trained.out + trained.err
    assert (training / "out" / "run" / "tokenizer.json").read_bytes() == (
        project / "tokenizer" / "tokenizer.json"
    ).read_bytes()
    monkeypatch.chdir(looking)
    assert "Hello" in treepack("show", project / "data", "--text").out
    record = json.loads((training / "out" / "run" / "run.json").read_text())
    assert open_run_rows(record, tmp_path / "elsewhere" / "run").num_steps == 1
    # Another tokenizer of the same name is not taken.
    (project / "data" / "tokenizer").symlink_to(SAMPLE_DATA / "tokenizer")
    assert "Hello" in treepack("show", project / "data" / "packed", "--text").out


def test_a_name_of_the_template_cannot_leave_the_folder_of_the_model(tmp_path: Path, treepack: Run) -> None:
    rollouts = tmp_path / "r.jsonl"
    rollouts.write_text(json.dumps(CHAT))
    build_trie_directory(rollouts, tmp_path / "trie", BuildOptions(tokenizer=save(tmp_path / "t", PLAIN)))
    path = tmp_path / "trie" / "manifest.json"
    for bad in ({"default": "a", "../../x": "b"}, {"tool_use": "a"}, ["a"], None, {"default": 1}):
        manifest = json.loads(path.read_text())
        manifest["chat_template"]["text"] = bad
        write_manifest(path.parent, manifest)
        done = treepack("stats", path.parent)
        assert done.status == 1
        assert "is damaged (chat_template.text is" in done.err


def test_an_entry_has_the_templates_that_a_conversation_can_use(tmp_path: Path) -> None:
    same = AutoTokenizer.from_pretrained(save(tmp_path, {"default": PLAIN, "tool_use": PLAIN, "rag": "x"}))  # type: ignore[arg-type]
    assert template_entry(same)["text"] == PLAIN
    assert is_template_of(PLAIN.replace("\n", "\r\n"), template_entry(same))  # a file cannot keep these line ends
    assert not is_template_of(None, template_entry(same))
