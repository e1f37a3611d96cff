"""`--normalize-ids`: the ids and times of a conversation are numbered in the order of their first use."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from support.byte_tokenizer import PLAIN, save
from support.command_line import Run
from treepack.tokenise.stable_ids import stable_messages, with_stable_ids
from treepack.trajectory import Chat, PromptCompletion, Trajectory

UUIDS = ("3b241101-e2bb-4255-8caf-4136c566a962", "0d1f5c9e-77aa-4c3e-9d55-000000000001")


def conversation(call: str, uuid: str, time: str) -> list[dict[str, Any]]:
    function = {"name": "find", "arguments": {"run": uuid, "uuid": [uuid, 3]}}
    return [
        {"role": "user", "content": f"It is {time}, run {uuid}."},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": f"I use {call}.",
            "tool_calls": [{"id": call, "type": "function", "function": function}],
        },
        {"role": "tool", "content": f"{call}: done at {time}", "tool_call_id": call, "name": "find"},
    ]


def test_two_conversations_that_differ_in_ids_become_equal() -> None:
    a, kinds = stable_messages(conversation("call_8f2a91", UUIDS[0], "2026-03-01T09:12:44.123Z"))
    b, _ = stable_messages(conversation("call_55d0c7", UUIDS[1], "2026-04-02T10:00:00.456Z"))
    assert a == b == conversation(
        "call00000", "00000000-0000-4000-8000-000000000000", "2000-01-01T00:00:00.000Z"
    )  # fmt: skip
    assert kinds == {"call", "uuid", "time"}


def test_times_keep_their_form() -> None:
    texts = {
        "at 2026-03-01 09:12": "at 2000-01-01 00:00",
        "at 2026-03-01T09:12:44+02:00 and 2026-03-01T09:12:45+02:00": (
            "at 2000-01-01T00:00:00+02:00 and 2000-01-01T00:00:01+02:00"
        ),
        "on 2026-03-01": "on 2026-03-01",
    }
    for text, expected in texts.items():
        (message,), _ = stable_messages([{"role": "user", "content": text}])
        assert message["content"] == expected


@given(st.lists(st.sampled_from(["call_aaaaaa", "call_bbbbbb", "call_cccccc", "x"]), min_size=1, max_size=8))
def test_equal_ids_stay_equal_and_different_ones_different(names: list[str]) -> None:
    calls = [
        {"role": "assistant", "content": name, "tool_calls": [
            {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
        for name in names
    ]  # fmt: skip
    done, _ = stable_messages(calls)
    ids = [message["tool_calls"][0]["id"] for message in done]
    assert all(re.fullmatch(r"call\d{5}", each) for each in ids)
    # As many pairs as old ids and as new ids: the map is one to one.
    pairs = {(old, new) for old, new in zip(names, ids, strict=True)}
    assert len(pairs) == len({old for old, _ in pairs}) == len({new for _, new in pairs})
    for old, new, message in zip(names, ids, done, strict=True):
        # "x" is too short to be replaced in text: it may mean something else there.
        assert message["content"] == ("x" if old == "x" else new)


def test_changes_are_noted_and_other_content_stays() -> None:
    item = Trajectory("a", "a:1", Chat(conversation("call_8f2a91", UUIDS[0], "noon"), [0.0, 1.0, 0.0]))
    assert with_stable_ids(item).notes == ("tool call ids made stable", "UUIDs made stable")
    # A second run changes nothing: the numbered ids are already the first, second, ... of their kind.
    again = with_stable_ids(with_stable_ids(item))
    assert again.content == with_stable_ids(item).content
    text = Trajectory("a", "a:1", PromptCompletion("p", "c"))
    assert with_stable_ids(text).content == text.content
    assert with_stable_ids(text).notes == ("no conversation, ids not made stable",)


def test_the_option_shares_prefixes_that_random_ids_had_separated(tmp_path: Path, treepack: Run) -> None:
    tokenizer = save(tmp_path / "tokenizer", PLAIN)
    path = tmp_path / "r.jsonl"
    last = {"role": "assistant", "content": "ok"}
    records = [
        {"id": name, "group_id": "g", "messages": [*conversation(name, uuid, "noon"), last]}
        for name, uuid in (("call_8f2a91", UUIDS[0]), ("call_55d0c7", UUIDS[1]))
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    plain = treepack("stats", str(path), "--tokenizer", tokenizer, "--json").json
    stable = treepack("stats", str(path), "--tokenizer", tokenizer, "--normalize-ids", "--json").json
    assert stable["tokens_tree"] < plain["tokens_tree"]  # type: ignore[operator]
    assert stable["num_nodes"] == 1
    assert stable["counts"] == {"UUIDs made stable": 2, "tool call ids made stable": 2}
