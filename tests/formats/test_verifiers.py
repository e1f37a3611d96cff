"""verifiers: graphs of messages, and the results of its earlier versions."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.paths import ROLLOUTS
from support.readings import Items, chat_of, read_as, trajectories
from support.token_rollouts import back
from treepack.calls.rollout_names import SPLIT_NOTE
from treepack.errors import TreepackError
from treepack.formats.trainers.verifiers import PARTIAL_NOTE, WEIGHTS_NOTE
from treepack.ingest.readers.messages.content_blocks import MEDIA_REASON
from treepack.trajectory import Chat, Skipped, Tokens, Trajectory

SAMPLES = ROLLOUTS
EPISODES = [json.loads(line) for line in (SAMPLES / "verifiers.jsonl").read_text().splitlines()]
RESULTS = [json.loads(line) for line in (SAMPLES / "verifiers-results" / "results.jsonl").read_text().splitlines()]
TASK = {"type": "T", "data": {}, "key": "k"}


def read(value: dict[str, Any]) -> Items:
    return read_as("verifiers", value)


def read_results(*values: dict[str, Any]) -> list[Trajectory]:
    return trajectories(read_as("verifiers-results", *values))


def traces(value: dict[str, Any]) -> list[Trajectory]:
    return trajectories(read(value))


def episode(nodes: list[dict[str, Any]], **trace: Any) -> dict[str, Any]:
    one = {"id": "t", "task": TASK, "agent": {"name": "agent"}, "rewards": {}, "nodes": nodes} | trace
    return {"id": "e", "env": {"id": "v"}, "task": TASK, "traces": [one]}


def node(parent: int | None, ids: list[int], num_sampled: int = 0, **more: Any) -> dict[str, Any]:
    role = "assistant" if num_sampled else "user"
    mask = [i >= len(ids) - num_sampled for i in range(len(ids))]
    message = {"role": role, "content": "".join(map(str, ids))}
    root = {} if parent is None else {"parent": parent}
    return root | {"message": message, "sampled": num_sampled > 0, "token_ids": ids, "mask": mask} | more


def without_tokens(value: dict[str, Any], keep: tuple[int, ...] = ()) -> dict[str, Any]:
    value = copy.deepcopy(value)
    for trace in value["traces"]:
        for number, each in enumerate(trace["nodes"]):
            if number not in keep:
                each.update(token_ids=[], mask=[], logprobs=[])
    return value


def test_each_path_of_the_graph_is_a_trajectory_of_exact_ids() -> None:
    first, second = traces(EPISODES[0])
    ids = [1, 10, 11, 2, 1, 20, 21, 2, 1, 30, 31, 32, 2, 1, 40, 41, 2, 1, 30, 33, 34, 2]
    # Sampled are the last three tokens of both answers; the template's two before them are not.
    logprobs = [-0.5, -0.25, -0.125, -1.0, -2.0, -0.0625]
    assert back(first) == (ids, [10, 11, 12, 19, 20, 21], logprobs, 1.1)
    assert back(second) == ([1, 10, 11, 2, 1, 22, 23, 2, 1, 30, 35, 2], [10, 11], [-0.75, -0.5], 1.1)
    assert [first.trajectory_id, second.trajectory_id] == ["t1/turn-1", "t1/turn-3"]
    assert {(item.group_id, item.step, item.source) for item in (first, second)} == {("g7", 12, "r.jsonl:1")}
    assert isinstance(first.content, Tokens)
    assert first.content.advantage is not None
    assert first.content.advantage.tolist() == [0.5] * 6
    assert first.content.ref_logprob is not None
    assert first.content.ref_logprob.tolist() == [2 * each for each in logprobs]
    assert (first.metadata["agent"], first.metadata["model"]) == ("agent", "qwen3-8b")


def test_the_tools_of_a_path_are_those_of_its_root() -> None:
    one = {"name": "f", "parameters": {}}
    talk = [node(None, [], tools=[one]), node(0, []), node(None, []), node(2, [])]
    for answer in (talk[1], talk[3]):
        answer |= {"sampled": True, "message": {"role": "assistant", "content": "x"}}
    contents = [item.content for item in traces(episode(talk, tools=[one, one | {"name": "g"}]))]
    names = [[tool["function"]["name"] for tool in each.tools or []] for each in contents if isinstance(each, Chat)]
    assert names == [["f"], ["f", "g"]]


def test_a_trace_with_images_is_skipped_and_a_model_that_could_see_some_is_not_enough() -> None:
    talk = [node(None, [1, 900]), node(0, [2, 3], 1, logprobs=[-0.5])]
    assert read(episode(talk, mm_token_type_id_map={"900": 1})) == [Skipped("r.jsonl:1", MEDIA_REASON)]
    assert len(traces(episode(talk, mm_token_type_id_map={"901": 1}))) == 1
    talk[0]["message"] = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    assert read(episode(talk)) == [Skipped("r.jsonl:1", MEDIA_REASON)]


def test_without_token_ids_the_messages_are_read_and_only_sampled_ones_trained() -> None:
    first, second = traces(without_tokens(EPISODES[0]))
    assert isinstance(first.content, Chat)
    assert first.content.message_weights == [0.0, 0.0, 1.0, 0.0, 1.0]
    assert first.content.messages[2]["tool_calls"][0]["function"] == {
        "name": "grep",
        "arguments": '{"pattern": "def f"}',
    }
    assert first.content.tools is not None
    assert first.content.tools[0]["function"]["name"] == "grep"
    assert chat_of(second).message_weights == [0.0, 0.0, 1.0]
    assert (first.notes, second.notes) == ((SPLIT_NOTE,), ())


def test_token_ids_of_some_messages_only_are_not_mixed_with_text() -> None:
    (trajectory,) = traces(without_tokens(EPISODES[1], keep=(0, 1, 2)))
    assert isinstance(trajectory.content, Chat)
    assert PARTIAL_NOTE in trajectory.notes


def test_fields_that_nobody_knows_are_metadata_or_noted() -> None:
    nodes = [node(None, [1]), node(0, [2], 1)]
    (trajectory,) = traces(episode(nodes, difficulty=3, attempts=[1, 2]))
    assert (trajectory.metadata["difficulty"], trajectory.notes) == (3, ("field 'attempts' not used",))


def test_loss_weights_are_noted() -> None:
    (trajectory,) = traces(episode([node(None, [1]), node(0, [2], 1, loss_weights={"ce": [1.0]})]))
    assert trajectory.notes == (WEIGHTS_NOTE,)


def test_a_graph_that_contradicts_itself_is_refused() -> None:
    for nodes, said in (
        ([node(None, [1]), node(1, [2], 1)], "node 1 has the parent 1; expected null or an earlier node"),
        ([node(None, [1]), node(0, [2], 1, mask=[])], "node 1 has the mask []; expected one value per token"),
        ([node(None, [1]), node(0, [2], 1, logprobs=[-1.0, -1.0])], "rollout_log_probs has 2 values"),
    ):
        with pytest.raises(TreepackError, match="trace 1") as caught:
            read(episode(nodes))
        assert said in str(caught.value)


@st.composite
def graphs(draw: st.DrawFn) -> list[dict[str, Any]]:
    nodes = [node(None, [0])]
    for number in range(1, draw(st.integers(2, 8))):
        ids = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
        nodes.append(node(draw(st.integers(0, number - 1)), ids, draw(st.integers(0, len(ids)))))
    return nodes


@given(graphs())
def test_every_sampled_token_is_trained_once_behind_its_own_path(nodes: list[dict[str, Any]]) -> None:
    expected = []
    for number, each in enumerate(nodes):
        path = [number]
        while (parent := nodes[path[0]].get("parent")) is not None:
            path.insert(0, parent)
        prefix = [token for k in path for token in nodes[k]["token_ids"]]
        start = len(prefix) - len(each["token_ids"])
        expected += [prefix[: start + i + 1] for i, flag in enumerate(each["mask"]) if flag]
    paths = [back(item) for item in traces(episode(nodes))]
    assert sorted(ids[: place + 1] for ids, trained, _, _ in paths for place in trained) == sorted(expected)


def test_a_line_without_steps_is_its_prompt_and_completion() -> None:
    value = {name: field for name, field in RESULTS[0].items() if name != "trajectory"}
    (trajectory,) = read_results(value)
    assert isinstance(trajectory.content, Chat)
    assert trajectory.content.message_weights == [0.0, 0.0, 1.0, 0.0, 1.0]
    assert trajectory.trajectory_id == "17/r.jsonl:1"
    (trajectory,) = read_results({"example_id": 1, "prompt": "p", "completion": "c", "reward": 1.0})
    assert isinstance(trajectory.content, Chat)
    assert [message["role"] for message in trajectory.content.messages] == ["user", "assistant"]
