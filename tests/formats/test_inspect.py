"""Logs of Inspect: what the model saw at each call, and files .eval with each compression."""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from support.paths import ROLLOUTS
from support.read_rollouts import read_trajectories
from support.readings import chats, read_value, reasons, turns
from treepack.errors import TreepackError
from treepack.files.input_files.eval_files import read_eval_file
from treepack.files.input_files.records import Record
from treepack.formats.evaluations import inspect
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.messages.content_blocks import MEDIA_REASON
from treepack.trajectory import Skipped, Trajectory

EVAL = {"task": "sums", "model": "m"}


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | more


def call(said: dict[str, Any], *prompt: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"event": "model", "input": list(prompt), "tools": [], "output": {"choices": [{"message": said}]}} | more


def sample(*events: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "s", "epoch": 1, "messages": [], "scores": {}, "events": list(events)} | more


def read(*samples: dict[str, Any], reward_key: str | None = None) -> list[Trajectory | Skipped]:
    record = Record("log.json", "log.json", {"version": 2, "eval": EVAL, "samples": list(samples)})
    return list(inspect.read_inspect(record, ReadOptions(reward_key=reward_key)))


ASKED, SAID = message("user", "q"), message("assistant", "A")


def test_calls_that_continue_each_other_are_joined_and_a_shortened_history_starts_a_trajectory() -> None:
    more = message("user", "r")
    grown = call(message("assistant", "B"), ASKED, SAID, more)
    shortened = call(message("assistant", "C"), more)
    items = chats(read(sample(call(SAID, ASKED), grown, shortened)))
    assert [[words for _, words, _ in turns(content)] for _, content in items] == [["q", "A", "r", "B"], ["r", "C"]]
    assert [content.message_weights for _, content in items] == [[0.0, 1.0, 0.0, 1.0], [0.0, 1.0]]


def test_calls_of_scorers_and_of_other_roles_are_left_out() -> None:
    spans = [
        {"event": "span_begin", "id": "1", "type": "scorers"},
        {"event": "span_begin", "id": "2", "type": "scorer", "parent_id": "1"},
        {"event": "span_begin", "id": "3", "type": "agent", "parent_id": "2"},
    ]
    others = [call(SAID, message("user", name), span_id=name) for name in "123"]
    grader = call(SAID, message("user", "g"), role="grader")
    ((_, content),) = chats(read(sample(*spans, *others, grader, call(SAID, ASKED))))
    assert content.messages[0]["content"] == "q"


def test_a_tool_that_failed_is_read_as_the_model_saw_it() -> None:
    failed = message("tool", "", tool_call_id="c", function="f", error={"type": "timeout", "message": "too slow"})
    calls = message("assistant", "", tool_calls=[{"id": "c", "function": "f", "arguments": {}}])
    ((_, content),) = chats(read(sample(call(SAID, ASKED, calls, failed))))
    assert content.messages[2] == {"role": "tool", "content": "Error: too slow", "tool_call_id": "c", "name": "f"}


def test_reasoning_is_read_without_its_redacted_part() -> None:
    thoughts = [{"type": "reasoning", "reasoning": each} for each in ("One.", "Two.")]
    hidden = {"type": "reasoning", "reasoning": "gAAA", "redacted": True}
    thought = message("assistant", [*thoughts, hidden, {"type": "text", "text": "A"}])
    ((_, content),) = chats(read(sample(call(thought, ASKED))))
    assert content.messages[1] == {"role": "assistant", "content": "A", "reasoning_content": "One.\n\nTwo."}


def test_a_log_without_events_is_read_from_its_messages_with_a_note() -> None:
    output = {"choices": [{"message": SAID, "stop_reason": "max_tokens"}]}
    ((trajectory, content),) = chats(read(sample(messages=[ASKED, SAID, ASKED], output=output)))
    assert trajectory.notes == (inspect.MESSAGES_NOTE,)
    assert content.message_weights == [0.0, 1.0, 0.0]
    assert content.message_cuts == [False, True, False]


def test_what_cannot_be_trained_is_skipped_with_its_group() -> None:
    image = message("user", [{"type": "image", "image": "data:"}])
    items = read(sample(call(SAID, image)), sample(messages=[ASKED]))
    assert reasons(items) == [f"call not used: {MEDIA_REASON}", inspect.NO_CALL]
    assert {item.group_id for item in items} == {"sums/s"}
    assert reasons(read()) == ["log without samples"]


def test_the_reward_key_selects_one_of_several_scores() -> None:
    scores = {"match": {"value": "C"}, "quality": {"value": {"style": 2, "facts": 5}}}
    one = sample(call(SAID, ASKED), scores=scores)
    for key, reward in (("match", 1.0), ("quality.facts", 5.0), (None, None)):
        ((trajectory, _),) = chats(read(one, reward_key=key))
        assert trajectory.reward == reward
        assert (inspect.SCORES_NOTE in trajectory.notes) == (key is None)


def zipped(entries: dict[str, Any]) -> bytes:
    """A zip archive compressed with zstd, as Inspect writes it: zipfile cannot, so its records are written here."""
    body, directory = io.BytesIO(), io.BytesIO()
    for name, value in entries.items():
        data = json.dumps(value).encode()
        stored = pa.compress(data, "zstd", asbytes=True)
        sizes = (20, 0, 93, 0, 0, zlib.crc32(data), len(stored), len(data), len(name), 0)
        start = body.tell()
        body.write(struct.pack("<4s5H3I2H", b"PK\x03\x04", *sizes) + name.encode() + stored)
        directory.write(struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 20, *sizes, 0, 0, 0, 0, start) + name.encode())
    start, listed = body.tell(), directory.getvalue()
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, len(entries), len(entries), len(listed), start, 0)
    return body.getvalue() + listed + end


def deflated(entries: dict[str, Any]) -> bytes:
    """A zip archive as Inspect wrote it before zstd."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in entries.items():
            archive.writestr(name, json.dumps(value))
    return buffer.getvalue()


@pytest.mark.parametrize("pack", [zipped, deflated])
@pytest.mark.parametrize("header", ["header.json", "_journal/start.json"])
def test_a_file_eval_is_read_like_the_document(pack: Any, header: str, tmp_path: Path) -> None:
    document = next((ROLLOUTS / "inspect").iterdir())
    log = json.loads(document.read_text())
    samples = log.pop("samples")
    entries = {header: log} | {f"samples/{each['id']}_epoch_{each['epoch']}.json": each for each in samples}
    (tmp_path / "log.eval").write_bytes(pack(entries))
    result = [(item.trajectory_id, item.reward, content) for item, content in chats(read_trajectories([tmp_path]))]
    assert result == [
        (item.trajectory_id, item.reward, content) for item, content in chats(read_trajectories([document]))
    ]


def test_a_damaged_entry_and_one_that_is_too_large_are_refused_in_one_sentence(tmp_path: Path) -> None:
    data = zipped({"header.json": {"version": 2, "eval": EVAL}, "samples/s_epoch_1.json": sample(call(SAID, ASKED))})
    path = tmp_path / "log.eval"
    at = data.index(b"samples/s_epoch_1.json") + 40
    path.write_bytes(data[:at] + b"\xff\xff\xff\xff" + data[at + 4 :])
    with pytest.raises(TreepackError, match=r"log\.eval: samples/s_epoch_1\.json is damaged \(.*\); restore the file"):
        list(read_trajectories([path]))
    with pytest.raises(TreepackError, match=r"header\.json has \d+ bytes; raise --max-record-size"):
        list(read_eval_file(data, "log.eval", max_size=10))


def test_a_log_without_samples_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "log.eval").write_bytes(deflated({"header.json": {"version": 2, "eval": EVAL, "status": "started"}}))
    assert reasons(read_trajectories([tmp_path])) == ["log without samples"]
    assert reasons(read_value(inspect.read_inspect, {"eval": EVAL, "samples": None})) == ["log without samples"]
