"""The sample data is what sample_data/make.py writes, and it holds what sample_data/README.md promises."""

import json
import math
import runpy
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from support.paths import SAMPLE_DATA

SAMPLES = SAMPLE_DATA
SOURCES = {"README.md", "make.py", "workshop.py"}


def read_lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (SAMPLES / name).read_text().splitlines()]


def file_bytes(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(SAMPLES / "tokenizer")


@pytest.fixture(scope="module")
def chat() -> list[dict[str, Any]]:
    return read_lines("chat.jsonl")


@pytest.fixture(scope="module")
def rollouts() -> list[dict[str, Any]]:
    return read_lines("tokens.jsonl")


def render(tokenizer: Any, messages: list[dict[str, Any]], tools: Any, *, prompt: bool = False) -> str:
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
    assert isinstance(text, str)
    return text


def test_files_are_what_the_script_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SAMPLES)  # as for a script in it
    runpy.run_path(str(SAMPLES / "make.py"))["main"](tmp_path)
    committed = {name: data for name, data in file_bytes(SAMPLES).items() if name not in SOURCES}
    assert file_bytes(tmp_path) == committed


def test_sample_data_is_small() -> None:
    assert sum(map(len, file_bytes(SAMPLES).values())) < 700_000


@pytest.mark.parametrize(
    "text", ["Your bicycle is ready at 16:30.", "na\u00efve \U0001f6b2\n\n  two  spaces", "<think>\n"]
)
def test_tokenizer_round_trips(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_single_ids(tokenizer: Any) -> None:
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert len(tokenizer.encode("<|im_start|><|im_end|><|endoftext|>")) == 3


def test_chat_has_the_promised_shape(tokenizer: Any, chat: list[dict[str, Any]]) -> None:
    trials = defaultdict(list)
    for row in chat:
        trials[row["task_id"]].append(row)
        assert sum(message["role"] == "user" for message in row["messages"]) in (2, 3)
        assert 800 <= len(tokenizer.encode(render(tokenizer, row["messages"], row["tools"]))) <= 2500
    assert len(trials) == 8
    for rows in trials.values():
        assert [row["trial"] for row in rows] == [0, 1, 2, 3]
        assert all(row["messages"][:2] == rows[0]["messages"][:2] and row["tools"] == rows[0]["tools"] for row in rows)


@pytest.mark.parametrize("with_tools", [True, False])
def test_each_assistant_turn_extends_its_prompt(tokenizer: Any, chat: list[dict[str, Any]], with_tools: bool) -> None:
    num_turns = 0
    for row in chat:
        tools = row["tools"] if with_tools else None
        for k, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                prompt = render(tokenizer, row["messages"][:k], tools, prompt=True)
                assert render(tokenizer, row["messages"][: k + 1], tools).startswith(prompt)
                num_turns += 1
    assert num_turns > 32 * 5


def test_reasoning_before_the_last_user_message_is_stripped(tokenizer: Any, chat: list[dict[str, Any]]) -> None:
    for row in chat:
        messages = row["messages"]
        last_user = max(i for i, message in enumerate(messages) if message["role"] == "user")
        kept = sum("reasoning_content" in message for message in messages[last_user:])
        assert 0 < kept < sum("reasoning_content" in message for message in messages)
        assert render(tokenizer, messages, row["tools"]).count("<think>") == kept


def test_equal_user_messages_do_not_move_the_last_one(tokenizer: Any) -> None:
    yes, said = (
        {"role": "user", "content": "Yes."},
        {"role": "assistant", "content": "Good.", "reasoning_content": "Hm."},
    )
    assert render(tokenizer, [yes, said, yes, said], None).count("<think>") == 1


def test_consecutive_tool_results_share_a_turn(tokenizer: Any) -> None:
    results = [{"role": "tool", "content": text} for text in ("one", "two")]
    expected = (
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
    )
    assert render(tokenizer, results, None) == expected


def test_call_arguments_may_be_a_string_or_an_object(tokenizer: Any) -> None:
    def turn(arguments: Any) -> str:
        calls = [{"type": "function", "function": {"name": "find", "arguments": arguments}}]
        return render(tokenizer, [{"role": "assistant", "content": None, "tool_calls": calls}], None)

    assert turn('{"a":  1}') == (
        '<|im_start|>assistant\n<tool_call>{"name": "find", "arguments": {"a":  1}}</tool_call><|im_end|>\n'
    )
    assert turn({"a": 1}) == turn('{"a": 1}')


def test_chat_holds_one_duplicate_and_one_prefix(chat: list[dict[str, Any]]) -> None:
    pairs = [(a["messages"], b["messages"]) for i, a in enumerate(chat) for b in chat[i + 1 :]]
    assert sum(a == b for a, b in pairs) == 1
    assert sum(a != b and (a[: len(b)] == b or b[: len(a)] == a) for a, b in pairs) == 1


def test_the_prefix_rollout_is_a_prefix_in_tokens_too(tokenizer: Any, chat: list[dict[str, Any]]) -> None:
    whole, cut = [row for row in chat if row["task_id"] == "desk-005" and row["trial"] in (0, 3)]
    ids = [tokenizer.encode(render(tokenizer, row["messages"], row["tools"])) for row in (whole, cut)]
    assert ids[0][: len(ids[1])] == ids[1]
    assert len(ids[0]) > len(ids[1])


def test_token_columns_agree(tokenizer: Any, rollouts: list[dict[str, Any]]) -> None:
    assert len(rollouts) == 32
    for row in rollouts:
        assert all(0 <= token < len(tokenizer) for token in row["prompt_ids"] + row["response_ids"])
        assert len(row["response_ids"]) == len(row["response_mask"]) == len(row["rollout_log_probs"])
        assert all(
            (value < 0) == bool(m) for m, value in zip(row["response_mask"], row["rollout_log_probs"], strict=True)
        )


def test_samples_of_a_prompt_are_one_sampled_tree(rollouts: list[dict[str, Any]]) -> None:
    children: dict[Any, dict[int, float]] = defaultdict(dict)
    prompts = {row["uid"]: row["prompt_ids"] for row in rollouts}
    for row in rollouts:
        assert row["prompt_ids"] == prompts[row["uid"]]
        for i, (token, value) in enumerate(zip(row["response_ids"], row["rollout_log_probs"], strict=True)):
            assert children[row["uid"], tuple(row["response_ids"][:i])].setdefault(token, value) == value
    forks = [values.values() for values in children.values() if len(values) > 1]
    assert len(forks) >= 3 * len(prompts)
    # 0.002: the values are rounded to three decimals.
    assert all(sum(map(math.exp, values)) <= 1.002 for values in forks if all(values))


def test_rewards_differ_within_each_prompt(rollouts: list[dict[str, Any]]) -> None:
    rewards = defaultdict(set)
    for row in rollouts:
        rewards[row["uid"]].add(row["reward"])
    assert all(len(values) > 1 for values in rewards.values())


def test_search_tree_has_ten_leaves_and_one_winning_path() -> None:
    tree = json.loads((SAMPLES / "search_tree.json").read_text())
    leaves: list[dict[str, Any]] = []
    nodes = [tree["tree"]["tree"]]
    for node in nodes:
        nodes += node["children"]
        leaves += [] if node["children"] else [node]
        assert node["child_count"] == len(node["children"])
    assert len(leaves) == 10
    assert [leaf["pruned"] for leaf in leaves].count(False) == 1
    prompts = tree["answer_generation"]["train_messages"]
    assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(prompts))


def test_model_config_fits_the_tokenizer(tokenizer: Any) -> None:
    config = AutoConfig.from_pretrained(SAMPLES / "tiny-qwen3.json")
    assert (config.model_type, config.vocab_size) == ("qwen3", len(tokenizer))
    assert config.num_attention_heads * config.head_dim == config.hidden_size
