"""Files of prompts and the tables of other commands become queries, with the prompts that they name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.paths import ROOT
from support.read_rollouts import read_trajectories, tokenize
from support.refusal import refusal
from support.strategies import make
from treepack.errors import TreepackError
from treepack.files.manifest import Provenance
from treepack.rollout.prompts import PromptReader
from treepack.rollout.queries import QueryFile, QuerySources, read_queries
from treepack.rollout.query import Query
from treepack.tokenise.tokenization import read_tokenizer
from treepack.trajectory import Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.store.trie_files import write_trie

TOKENIZER = ROOT / "sample_data" / "tokenizer"


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path: Path, *records: dict[str, Any], **sources: Any) -> QueryFile:
    return read_queries(write(path / "prompts.jsonl", *records), QuerySources(**sources))


def only(queries: QueryFile) -> Query:
    (query,) = queries.queries
    return query


def trie_of(path: Path, *trajectories: Trajectory) -> Path:
    (path / "trie").mkdir()
    write_trie(build_trie(list(trajectories)), path / "trie", provenance=Provenance())
    return path / "trie"


def recorded(tmp_path: Path) -> Path:
    """A trie with a rollout of two turns, a continuation inside of its second turn, and one of another group."""
    first = make(
        "task/0",
        [1, 2, 3, 4, 5, 6, 7, 8],
        spans=[(3, 5, 1.0), (6, 8, 1.0)],
        group="task",
        step=4,
        reward=1.0,
        metadata={"segments": [3, 6], "segment_ids": [1, 4], "solution": "42", "finish": "stop"},
    )
    second = make(
        "task/0@7/0",
        [1, 2, 3, 4, 5, 6, 7, 9, 10, 11],
        spans=[(7, 8, 1.0), (9, 10, 1.0)],
        group="task",
        step=4,
        reward=0.0,
        metadata={
            "segments": [3, 6, 7],
            "segment_ids": [1, 4, 99],
            "parent_rollout": "task/0",
            "parent_tokens": 7,
        },
    )
    third = make("other/0", [1, 2, 9, 9], spans=[(2, 4, 1.0)], group="other", step=4, reward=0.0)
    return trie_of(tmp_path, first, second, third)


def test_token_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    for name in ("prompt_token_ids", "prompt_ids", "prompts", "input_ids"):
        query = only(read(tmp_path, {name: [5, 6], "group_id": "a", "solution": "42"}))
        assert query.prompt.dtype == np.int32
        assert (query.prompt.tolist(), query.key, query.group_id) == ([5, 6], "a", "a")
        assert query.fields["solution"] == "42"


@pytest.mark.parametrize("name", ["query_id", "uid", "group_id", "task_id", "id"])
def test_the_group_is_the_name_that_the_record_has(tmp_path: Path, name: str) -> None:
    assert only(read(tmp_path, {"prompt_ids": [5], name: 7})).group_id == "7"


@pytest.mark.parametrize("line", [0, 5])
def test_a_chat_prompt_has_the_ids_and_the_group_of_its_recorded_rollout(tmp_path: Path, line: int) -> None:
    conversation = json.loads((ROOT / "sample_data" / "chat.jsonl").read_text().splitlines()[line])
    messages = conversation["messages"]
    first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    # The prompt of a rollout without a name has a group that its text decides.
    whole = {name: conversation[name] for name in ("messages", "tools")}
    file = write(tmp_path / "rollout.jsonl", whole)
    # The template rewrites earlier turns, so the conversation is several samples; the first one starts with the prompt.
    rollout, *_ = tokenize(read_trajectories([file]), tokenizer=str(TOKENIZER), expand="turns")
    assert isinstance(rollout, Trajectory)
    assert isinstance(rollout.content, Tokens)
    reader = PromptReader(read_tokenizer(str(TOKENIZER)))
    for name in ("messages", "prompt"):
        query = only(read(tmp_path, {name: messages[:first], "tools": whole["tools"]}, reader=reader))
        assert query.prompt.tolist() == rollout.content.tokens[: rollout.content.starts[0]].tolist()
        assert query.group_id == rollout.group_id


def test_a_text_prompt_is_tokenised_without_a_template(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(str(TOKENIZER))
    query = only(read(tmp_path, {"prompt": "two branches"}, reader=PromptReader(tokenizer)))
    assert tokenizer.backend_tokenizer.decode(query.prompt.tolist()) == "two branches"


def test_an_augmented_query_gets_the_fields_of_its_parent_and_its_reused_turn(tmp_path: Path) -> None:
    original = write(tmp_path / "tasks.jsonl", {"group_id": "task", "prompt_ids": [1, 2, 3], "solution": "42"})
    line = {
        "query_id": "task~1",
        "group_id": "task~1",
        "parent_group": "task",
        "parent_trajectory": "task/0",
        "num_reused": 2,
        "untrained_prefix": 5,
        "prompt_token_ids": [1, 2, 3, 4, 5],
        "text": None,
    }
    queries = read(tmp_path, line, prompts=(original,))
    query = only(queries)
    assert (queries.kind, query.key, query.untrained_prefix) == ("augmented", "task~1", 5)
    assert (query.fields["solution"], query.turns, query.begun_turn.tolist()) == ("42", ((3, 5),), [4, 5])
    # An environment replays the turns of the rollout itself.
    task = recorded(tmp_path)
    longer = line | {"prompt_token_ids": [1, 2, 3, 4, 5, 6, 7], "untrained_prefix": 7, "num_reused": 4}
    assert only(read(tmp_path, longer, trie=task, has_environment=True)).turns == ((3, 5), (6, 7))
    assert "whose turns the environment replays; give the trie" in refusal(read, tmp_path, longer, has_environment=True)


def test_selected_queries_are_joined_with_their_prompts(tmp_path: Path) -> None:
    tasks = write(tmp_path / "tasks.jsonl", {"id": "task", "prompt_ids": [1, 2, 3], "solution": "42"})
    augmented = {"query_id": "task~1", "parent_group": "task", "untrained_prefix": 4, "num_reused": 1}
    more = write(tmp_path / "augmented.jsonl", augmented | {"prompt_token_ids": [1, 2, 3, 4]})
    lines = [{"query_id": name, "parent_id": None, "pass_rate": 0.5, "tried": 3.0} for name in ("task~1", "task")]
    queries = read(tmp_path, *lines, prompts=(tasks, more), step=7)
    assert queries.kind == "selected"
    assert [(query.key, query.prompt.tolist(), query.step) for query in queries.queries] == [
        ("task~1", [1, 2, 3, 4], 7),
        ("task", [1, 2, 3], 7),
    ]
    assert [query.fields["solution"] for query in queries.queries] == ["42", "42"]
    with pytest.raises(TreepackError, match=r"names the group task~1, and no file .*--prompts FILE, or with --trie"):
        read(tmp_path, *lines)


@pytest.mark.parametrize("source", ["prompts", "trie"])
def test_roots_have_counts_and_no_query_for_0(tmp_path: Path, source: str) -> None:
    rows = [{"group_id": "task", "value": 0.5, "num_rollouts": 4, "utility": 1.0}, {"group_id": "x", "num_rollouts": 0}]
    rollouts = [
        {"group_id": "task", "prompt_ids": [1, 2, 3], "response_ids": [i], "reward": 1, "step": 3, "loss_mask": [1]}
        for i in range(2)
    ]
    given: Any = recorded(tmp_path) if source == "trie" else (write(tmp_path / "rollouts.jsonl", *rollouts),)
    queries = read(tmp_path, *rows, **{source: given}, step=8)
    query = only(queries)
    assert (queries.kind, queries.num_unused) == ("roots", 1)
    # The step is that of the rollouts to come, not of those that have the prompt.
    assert (query.key, query.prompt.tolist(), query.count, query.step) == ("task", [1, 2, 3], 4, 8)


def test_prefixes_have_the_turns_and_segments_of_their_rollout(tmp_path: Path) -> None:
    row = {"group_id": "task", "step": 4, "trajectory_id": "task/0", "num_tokens": 6, "num_continuations": 3}
    queries = read(tmp_path, row, trie=recorded(tmp_path))
    query = only(queries)
    assert (queries.kind, query.key, query.count, query.step) == ("prefixes", "task/0@6", 3, 4)
    assert (query.prompt.tolist(), query.parent_rollout) == ([1, 2, 3, 4, 5, 6], "task/0")
    # A new segment starts at 6, where one of the rollout starts too.
    assert (query.turns, query.cuts, query.cut_ids) == (((3, 5),), (3,), (1,))
    assert query.fields["solution"] == "42"


def test_a_prefix_of_a_continuation_has_the_turns_of_its_parent_too(tmp_path: Path) -> None:
    row = {"group_id": "task", "trajectory_id": "task/0@7/0", "num_tokens": 9, "num_continuations": 1}
    query = only(read(tmp_path, row, trie=recorded(tmp_path)))
    # The turn 7 9 was begun by the parent (7) and finished by the continuation (9).
    assert query.turns == ((3, 5), (6, 8))
    assert (query.cuts, query.cut_ids) == ((3, 6, 7), (1, 4, 99))


def test_a_row_without_a_trajectory_asks_for_further_rollouts_of_the_prompt(tmp_path: Path) -> None:
    row = {"group_id": "other", "step": 4, "trajectory_id": None, "num_tokens": None, "num_continuations": 2}
    query = only(read(tmp_path, row, trie=recorded(tmp_path)))
    # Another key than the group's first rollouts had, so another seed and other ids.
    assert (query.key, query.group_id, query.prompt.tolist()) == ("other@2", "other", [1, 2])
    assert (query.count, query.step, query.parent_rollout) == (2, 4, None)


def test_with_an_environment_a_record_needs_no_prompt(tmp_path: Path) -> None:
    query = only(read(tmp_path, {"maze": 7, "task_id": "m"}, has_environment=True))
    assert (query.key, len(query.prompt), query.fields) == ("m", 0, {"maze": 7, "task_id": "m"})


@pytest.mark.parametrize(
    ("records", "sentence"),
    [
        ([{"question": "?"}], "has the fields question; expected prompt_token_ids, messages or prompt, or"),
        ([{"prompt_ids": [1]}, {"prompt_ids": [1]}], r":2: is the same query prompt-\w+ as .*:1; remove one"),
        ([{"prompt_ids": []}], "has an empty prompt; expected at least one token"),
        ([{"prompt_ids": [1], "group_id": 1.5}], "group_id is 1.5; expected an id"),
        ([{"prompt_ids": [1]}, {"group_id": "b"}], ":2: has no prompt; expected"),
        ([{"input_ids": [1, 2], "loss_mask": [0, 1]}], "has input_ids and loss_mask, so it is a rollout or padded"),
        ([{"prompt_ids": [1], "prompts": [2]}], "prompt_ids and prompts differ; drop the wrong one"),
        ([{"prompt": "text"}], "contains text, not token ids; give --tokenizer NAME"),
        ([{"group_id": "a", "num_rollouts": -1}], "num_rollouts is -1; expected an integer of at least 0"),
        ([{"group_id": "a", "num_rollouts": 1}], "names the group a, and no file with its prompt is given"),
        ([{"group_id": "a", "trajectory_id": "r", "num_tokens": 3, "num_continuations": 1}], "give the trie that has"),
    ],
)
def test_bad_prompts_are_refused_in_one_sentence(tmp_path: Path, records: list[dict[str, Any]], sentence: str) -> None:
    with pytest.raises(TreepackError, match=sentence) as error:
        read(tmp_path, *records)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"trajectory_id": "gone"}, "has no trajectory 'gone'; give the trie it is from"),
        ({"num_tokens": 9}, "num_tokens is 9 and trajectory 'task/0' of .* has 8 tokens"),
        ({"group_id": "other"}, "has the group task in .*, not other"),
    ],
)
def test_a_table_of_another_trie_is_refused(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    row = {"group_id": "task", "trajectory_id": "task/0", "num_tokens": 6, "num_continuations": 3}
    with pytest.raises(TreepackError, match=sentence):
        read(tmp_path, row | change, trie=recorded(tmp_path))


def test_a_continuation_keeps_the_step_of_its_rollout(tmp_path: Path) -> None:
    row = {"group_id": "task", "trajectory_id": "task/0", "num_tokens": 6, "num_continuations": 3}
    assert "has the step 4; leave out --step 5" in refusal(read, tmp_path, row, trie=recorded(tmp_path), step=5)


def test_a_chat_that_ends_with_the_assistant_is_refused(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert "expected a conversation that the assistant continues" in refusal(
        read, tmp_path, {"messages": messages}, reader=PromptReader(read_tokenizer(str(TOKENIZER)))
    )


def test_rollouts_of_a_group_with_different_prompts_have_no_prompt(tmp_path: Path) -> None:
    trie = trie_of(
        tmp_path,
        make("a", [1, 2, 3], spans=[(2, 3, 1.0)], group="task"),
        make("b", [1, 9, 3], spans=[(2, 3, 1.0)], group="task"),
    )
    assert "start with different prompts; give the file that has its prompt" in refusal(
        read, tmp_path, {"group_id": "task", "num_rollouts": 2}, trie=trie
    )
