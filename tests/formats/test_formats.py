"""Every format: its sample under tests/rollouts is recognised, read whole, and keeps the facts that its `Format` lists.

A sample is made up from the format's description, one file or folder called after the format. Particular fields of a
format are tested in the file of its program.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.byte_tokenizer import PLAIN as TEMPLATE
from support.byte_tokenizer import save
from support.command_line import Run
from support.paths import ROLLOUTS
from support.read_rollouts import read_trajectories, tokenize
from support.readings import tokens_of
from treepack.errors import TreepackError
from treepack.files.input_files.inputs import list_inputs
from treepack.files.input_files.record_files import read_records
from treepack.ingest.readers.format import KEEPS
from treepack.ingest.readers.reading import detect_format
from treepack.ingest.readers.registry import all_formats, formats_by_name
from treepack.tokenise.tokenization import load_tokenizer
from treepack.trajectory import Chat, Skipped, Tokens, Trajectory

TOKEN_IDS, MASKS, LOGPROBS, REWARDS, LINEAGE = KEEPS

SAMPLES = ROLLOUTS
GENERAL = ("tokens", "chat", "columns")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(save(tmp_path_factory.mktemp("tokenizer"), TEMPLATE))


def sample(name: str) -> Path:
    (path,) = [each for each in SAMPLES.iterdir() if each.name.partition(".")[0] == name]
    return path


def read(name: str, **options: Any) -> list[Trajectory]:
    items = list(read_trajectories([sample(name)], shapes=True, **options))
    return [item for item in items if isinstance(item, Trajectory)]


def fields_of(value: Any) -> Iterator[str]:
    """Every name in `value`, nested ones as `outer.inner`; lists are looked through."""
    if isinstance(value, dict):
        for name, field in value.items():
            yield name
            yield from (f"{name}.{inner}" for inner in fields_of(field))
    elif isinstance(value, list):
        for field in value:
            yield from fields_of(field)


def test_every_sample_is_of_a_format_and_every_format_has_a_sample() -> None:
    assert {each.name.partition(".")[0] for each in SAMPLES.iterdir()} == set(formats_by_name())
    assert len(all_formats()) == len(formats_by_name())


@pytest.mark.parametrize("name", formats_by_name())
def test_a_format_is_recognised_by_its_own_reader_only(name: str) -> None:
    files, _, _ = list_inputs([sample(name)])
    for path in files:
        first = next(read_records(path))
        assert detect_format(first) == name
        others = {other.name for other in all_formats() if other.matches(first.value)}
        assert others <= {name, *GENERAL}


@pytest.mark.parametrize("name", formats_by_name())
def test_auto_reads_what_the_named_format_reads_and_reads_it_again(name: str) -> None:
    whole = read(name)
    assert len(whole) > 0
    assert repr(read(name, format=name)) == repr(whole) == repr(read(name))


@pytest.mark.parametrize("name", formats_by_name())
def test_a_format_keeps_what_it_says(name: str) -> None:
    trajectories = read(name)
    keeps = set(formats_by_name()[name].keeps)
    assert keeps <= set(KEEPS)
    contents = [each.content for each in trajectories]
    kept = set()
    if any(isinstance(content, Tokens) for content in contents):
        kept.add(TOKEN_IDS)
    if any(isinstance(content, Tokens) and content.sampling_logprob is not None for content in contents):
        kept.add(LOGPROBS)
    if any(each.reward is not None for each in trajectories):
        kept.add(REWARDS)
    groups = [each.group_id for each in trajectories]
    if all(group is not None for group in groups):
        kept.add(LINEAGE)
    chats = [content for content in contents if isinstance(content, Chat)]
    unlike_roles = any(
        weight != float(message["role"] == "assistant")
        for content in chats
        for message, weight in zip(content.messages, content.message_weights, strict=True)
    )
    if unlike_roles or any(isinstance(content, Tokens) for content in contents):
        kept.add(MASKS)
    assert keeps <= kept
    assert kept - {MASKS, LINEAGE, TOKEN_IDS} <= keeps


@pytest.mark.parametrize("name", formats_by_name())
def test_the_fields_that_a_format_uses_are_in_its_sample(name: str) -> None:
    files, _, _ = list_inputs([sample(name)])
    there = {field for path in files for record in read_records(path) for field in fields_of(record.value)}
    # "a.*" is the rest of a, "a.b=c" gives b the form of c, and "a!" is a text that is a name.
    used = formats_by_name()[name].used
    plain = [field.rstrip("!") for field in used if "*" not in field and "=" not in field]
    # "a.*.b=c" with a form c that is nowhere itself, such as that of the messages of an object by their ids.
    forms = {form for field in used if (form := field.partition("=")[2]) not in there}
    missing = [field for field in plain if field not in there and field.partition(".")[0] not in forms]
    assert missing == []


@pytest.mark.parametrize("name", formats_by_name())
def test_a_sample_can_be_tokenised_and_every_trajectory_trains_something(name: str, tokenizer: Any) -> None:
    done = list(tokenize(read(name), tokenizer=tokenizer, failed="keep"))
    assert [item.reason for item in done if isinstance(item, Skipped)] == []
    for item in done:
        assert isinstance(item, Trajectory)
        assert tokens_of(item).num_trained > 0


def refusal(path: Path, name: str) -> str | None:
    try:
        list(read_trajectories([path], format=name, shapes=True))
    except TreepackError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", formats_by_name())
def test_a_record_of_the_right_shape_and_wrong_kinds_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    """No reader lets a foreign error escape: each field of the first record replaced by a number, then by text."""
    files, _, _ = list_inputs([sample(name)])
    records = [record.value for record in read_records(files[0])]
    for field in records[0]:
        for wrong in (7, "x", [7], {"x": 7}, None):
            path = tmp_path / Path(files[0]).name
            path.write_text("\n".join(json.dumps(each) for each in [records[0] | {field: wrong}, *records[1:]]))
            said = refusal(path, name)
            assert said is None or re.fullmatch(r"[^\n]+[;,] [^\n]+", said)


def test_the_command_lists_every_format_with_what_it_keeps(treepack: Run) -> None:
    listed: dict[str, Any] = json.loads(treepack("formats", "--json").out)
    assert list(listed) == [each.name for each in all_formats()]
    assert {name: set(each["keeps"]) for name, each in listed.items()} == {
        each.name: set(each.keeps) for each in all_formats()
    }
    lines = treepack("formats").out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [each.name for each in all_formats()]
    assert "task_id, trial, reward" in treepack("formats", "tau-bench").out
