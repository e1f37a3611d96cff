"""Calls of chat-completions and Responses APIs in logs: joined calls, groups, and skipped records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.read_rollouts import read_trajectories
from support.readings import chat_of, only, read_as
from treepack.errors import TreepackError
from treepack.ingest.readers.registry import formats_by_name
from treepack.trajectory import Chat, Skipped, Tokens, Trajectory

ASK = {"role": "user", "content": "2 + 3?"}
MORE = {"role": "user", "content": "Sure?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def said(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def exchange(messages: list[Any], *answers: dict[str, Any], **more: Any) -> dict[str, Any]:
    choices = [{"index": number, "message": answer} for number, answer in enumerate(answers)]
    return {"request": {"messages": messages}, "response": {"id": "c1", "choices": choices}, **more}


def response(name: str, items: Any, text: str, **more: Any) -> dict[str, Any]:
    output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]
    return {"id": name, "object": "response", "input": items, "output": output, **more}


def outline(items: list[Any]) -> list[tuple[str, str | None, float | None, list[tuple[str, float]]]]:
    """Name, group, reward, and the content and weight of each message."""
    done = []
    for item in items:
        assert isinstance(item, Trajectory)
        assert isinstance(item.content, Chat)
        weighted = zip(item.content.messages, item.content.message_weights, strict=True)
        texts = [(message["content"], weight) for message, weight in weighted]
        done.append((item.trajectory_id, item.group_id, item.reward, texts))
    return done


def logprobs(*named: tuple[str, float]) -> dict[str, Any]:
    return {"content": [{"token": token, "logprob": value} for token, value in named]}


@pytest.mark.parametrize("named", [True, False])
def test_token_ids_of_a_server_are_used_instead_of_the_text(*, named: bool) -> None:
    first, second = (exchange([ASK], said("5"), session_id="s") for _ in range(2))
    first["response"]["prompt_token_ids"] = [1, 2]
    second["response"]["prompt_token_ids"] = [1, 2, 7, 8, 3]
    for value, ids, values in ((first, [7, 8], [-0.5, -1.0]), (second, [9], [-2.0])):
        choice = value["response"]["choices"][0]
        tokens = [f"token_id:{each}" if named else "x" for each in ids]
        choice["logprobs"] = logprobs(*zip(tokens, values, strict=True))
        if not named:
            choice["token_ids"] = ids
    (trajectory,) = read_as("openai-chat", first, second)
    content = trajectory.content
    assert isinstance(content, Tokens)
    assert content.tokens.tolist() == [1, 2, 7, 8, 3, 9]
    assert (content.starts.tolist(), content.ends.tolist()) == ([2, 5], [4, 6])
    assert content.sampling_logprob is not None
    assert content.sampling_logprob.tolist() == [-0.5, -1.0, -2.0]


def test_what_cannot_be_used_of_token_ids_is_noted() -> None:
    plain, with_ids = (exchange([ASK], said("5"), session_id="s") for _ in range(2))
    with_ids["response"]["choices"][0]["token_ids"] = [7]
    with_ids["response"]["prompt_token_ids"] = [1]
    assert read_as("openai-chat", with_ids, plain)[0].notes[-1] == "token ids of some calls only, not used"
    with_ids["response"]["choices"][0] = {"message": said("5"), "logprobs": logprobs(("5", -1.0))}
    assert read_as("openai-chat", with_ids)[0].notes == ("log-probabilities without token ids not used",)


def batch_line(name: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": name, "response": {"status_code": 200, "body": body}, "error": None}


def write(path: Path, *values: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def test_an_unreadable_file_beside_a_batch_is_no_file_of_requests(tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text("[1]\n[2]\n")
    write(tmp_path / "requests.jsonl", {"custom_id": "a", "method": "POST", "body": {"messages": [ASK]}})
    answers = write(tmp_path / "results.jsonl", batch_line("a", exchange([], said("5"))["response"]))
    only(read_trajectories([answers]))


def test_a_batch_is_read_with_its_requests(tmp_path: Path) -> None:
    ask = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [ASK], "tools": [TOOL]},
    }
    answer = exchange([], said("5"))["response"]
    requests = write(tmp_path / "requests.jsonl", ask)
    answers = write(
        tmp_path / "answers.jsonl",
        batch_line("a", answer),
        batch_line("b", answer),
        {"custom_id": "c", "response": None, "error": {"code": "expired"}},
    )
    items: list[Any] = list(read_trajectories([tmp_path]))
    assert outline(items[:1]) == [("a", None, None, [("2 + 3?", 0.0), ("5", 1.0)])]
    assert items[0].content.tools == [TOOL]
    assert items[1:] == [
        Skipped(f"{answers}:2", "response of a batch without its request in a file of the folder"),
        Skipped(f"{answers}:3", "request that failed"),
        Skipped(f"{requests}:1", "batch request, read with its response", is_rollout=False),
    ]


def test_two_requests_of_one_custom_id_are_refused(tmp_path: Path) -> None:
    asks = [{"custom_id": "a", "body": {"messages": [each]}} for each in (ASK, MORE)]
    write(tmp_path / "requests.jsonl", *asks)
    answers = write(tmp_path / "answers.jsonl", batch_line("a", exchange([], said("5"))["response"]))
    with pytest.raises(
        TreepackError, match=r"requests.jsonl:2: repeats the custom_id 'a' with another request; keep one of them$"
    ):
        list(read_trajectories([answers]))


def test_a_conversation_goes_on_and_a_session_repeats_its_messages() -> None:
    conversation = [
        response("r1", "2 + 3?", "5", conversation={"id": "v"}),
        response("r2", "Sure?", "Yes.", conversation={"id": "v"}),
    ]
    session = [
        response("r1", "2 + 3?", "5", metadata={"session_id": "r1"}),
        response("r2", [ASK, said("5"), MORE], "Yes.", metadata={"session_id": "r1"}),
    ]
    texts = [("2 + 3?", 0.0), ("5", 1.0), ("Sure?", 0.0), ("Yes.", 1.0)]
    assert outline(read_as("openai-responses", *conversation)) == [("r1", None, None, texts)]
    assert outline(read_as("openai-responses", *session)) == [("r1", None, None, texts)]


@pytest.mark.parametrize("odd", [{"conversation": [{"id": "v"}]}, {"previous_response_id": ""}])
def test_an_id_of_a_response_of_another_form_is_refused(odd: dict[str, Any]) -> None:
    with pytest.raises(TreepackError, match=rf"{next(iter(odd))} is .*; expected an id"):
        read_as("openai-responses", response("r1", "2 + 3?", "5") | odd)


def test_calls_with_images_are_skipped_and_so_are_those_that_go_on_from_them() -> None:
    seen = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    skipped = [Skipped("r.jsonl:1", "images, audio and video are not read")]
    assert read_as("openai-chat", exchange([seen], said("5"))) == skipped
    first = response("r1", [{"role": "user", "content": [{"type": "input_image"}]}], "5")
    second = response("r2", "Sure?", "Yes.", previous_response_id="r1")
    lost = Skipped("r.jsonl:2", "response whose previous_response_id is not in the file")
    assert read_as("openai-responses", first, second) == [*skipped, lost]


def test_an_item_that_the_input_refers_to_is_put_in_its_place() -> None:
    first, second = response("r1", "2 + 3?", "5"), response("r2", [ASK], "Yes.")
    first["output"][0]["id"] = "m1"
    second["input"] = [ASK, {"type": "item_reference", "id": "m1"}, MORE]
    items = read_as("openai-responses", first, second)
    assert outline(items)[1][-1] == [("2 + 3?", 0.0), ("5", 0.0), ("Sure?", 0.0), ("Yes.", 1.0)]
    second["input"][1]["id"] = "m2"
    assert read_as("openai-responses", second) == [
        Skipped("r.jsonl:1", "response whose input refers to an item that is not in the file")
    ]


def test_a_response_that_is_logged_without_its_input_is_skipped() -> None:
    alone = response("r1", "2 + 3?", "5")
    del alone["input"]
    assert formats_by_name()["openai-responses"].matches(alone)
    assert read_as("openai-responses", alone) == [Skipped("r.jsonl:1", "response without its input")]


@pytest.mark.parametrize(
    ("reader", "asks", "answers"), [("openai-chat", "messages", "choices"), ("openai-responses", "input", "output")]
)
def test_half_a_pair_is_refused(reader: str, asks: str, answers: str) -> None:
    with pytest.raises(TreepackError) as caught:
        read_as(reader, {"request": {"model": "m"}, "response": {}})
    expected = f"is not a pair of a request with {asks} and a response with {answers}; expected one pair per record"
    assert str(caught.value) == f"r.jsonl:1: {expected}"


def anthropic(messages: list[Any], *blocks: dict[str, Any], **more: Any) -> dict[str, Any]:
    answer = {"id": "msg_1", "type": "message", "role": "assistant", "content": list(blocks)}
    return {"request": {"system": "S", "messages": messages}, "response": answer, **more}


def test_a_call_of_anthropics_api_without_a_session_is_named_after_its_response() -> None:
    image = {"role": "user", "content": [{"type": "image", "source": {}}]}
    items = read_as("anthropic-messages", anthropic([ASK], {"type": "text", "text": "5"}), anthropic([image]))
    assert [getattr(item, "trajectory_id", None) for item in items] == [None, "msg_1"]
    assert items[0].reason == "images, audio and video are not read"


@pytest.mark.parametrize(
    ("reader", "pair", "tool"),
    [
        ("anthropic-messages", anthropic([ASK], {"type": "text", "text": "5"}), {"name": "add", "input_schema": {}}),
        (
            "openai-responses",
            {"request": {"input": "2 + 3?"}, "response": response("r1", "2 + 3?", "5")},
            {"type": "function", "name": "add", "parameters": {}},
        ),
    ],
)
def test_the_tools_of_a_request_are_read(reader: str, pair: dict[str, Any], tool: dict[str, Any]) -> None:
    item = only(read_as(reader, pair | {"request": pair["request"] | {"tools": [tool]}}))
    assert chat_of(item).tools == [TOOL]
