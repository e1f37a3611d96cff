"""Tokenisation: the trained spans are exactly the generated text, and the tokens before are exactly its prompt."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from support.byte_tokenizer import MARKED, PLAIN, STRIPPING, save
from support.paths import REAL
from support.read_rollouts import tokenize
from support.readings import tokens_of
from support.tokenised_chats import assistant, samples, text, trained_texts, user
from treepack.errors import TreepackError
from treepack.tokenise.template.stops import PREFILL_NOTE, STOP_NOTE
from treepack.tokenise.tokenization import load_tokenizer
from treepack.trajectory import (
    AnswerBounds,
    Chat,
    Int64,
    PromptCompletion,
    Skipped,
    Tokens,
    Trajectory,
    derived_group,
    positions,
)

NUM_REAL = 4  # real rollouts of each source; the tokenizer of bytes takes a second for a long one


@pytest.fixture(scope="session")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tokenizers")
    templates = {"stripping": STRIPPING, "marked": MARKED, "plain": PLAIN, "none": None}
    return {name: save(folder / name, template) for name, template in templates.items()}


@pytest.fixture(scope="session")
def tokenizers(names: dict[str, str]) -> dict[str, Any]:
    return {name: load_tokenizer(path) for name, path in names.items()}


def chat(messages: list[dict[str, Any]], **more: Any) -> Trajectory:
    weights = more.pop("weights", [float(message["role"] == "assistant") for message in messages])
    return Trajectory("t", "r.jsonl:1", Chat(messages, weights, more.pop("tools", None)), **more)


def trained_of(item: Trajectory) -> Int64:
    return positions(tokens_of(item).starts, tokens_of(item).ends)


def prompt_ids(tokenizer: Any, messages: list[dict[str, Any]], tools: Any = None) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tools=tools, return_dict=False))


# Letters of special tokens (<|), characters of several bytes, and a line separator that is not a newline.
words = st.text(st.sampled_from("ab \n.<|>é\u2028日"), max_size=8)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": draw(words)}] if draw(st.booleans()) else []
    messages.append(user(draw(words)))
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["assistant", "assistant", "user", "tool"]))
        message: dict[str, Any] = {"role": kind, "content": draw(words)}
        if kind == "assistant" and draw(st.booleans()):
            message["reasoning_content"] = draw(words)
        if kind == "assistant" and draw(st.booleans()):
            arguments = draw(st.sampled_from(['{"x": 1}', "{}", "not json"]))
            call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
            message["tool_calls"] = [call]
        messages.append(message)
    return [*messages, assistant(draw(words))]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(conversations(), st.sampled_from(["stripping", "marked", "plain"]), st.booleans())
def test_every_turn_follows_the_prompt_that_its_sampler_saw(
    tokenizers: dict[str, Any], messages: list[dict[str, Any]], name: str, with_tools: bool
) -> None:
    tokenizer = tokenizers[name]
    tools = [{"type": "function", "function": {"name": "f"}}] if with_tools else None
    given_messages = copy.deepcopy(messages)
    turns = samples(chat(messages, tools=tools), tokenizer, expand="turns")
    indices = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(turns) == len(indices)
    for sample, k in zip(turns, indices, strict=True):
        content = tokens_of(sample)
        (start,), (end,) = content.starts.tolist(), content.ends.tolist()
        assert content.tokens[:start].tolist() == prompt_ids(tokenizer, messages[:k], tools)
        rendered = tokenizer.apply_chat_template(messages[: k + 1], tools=tools, tokenize=False)
        # The newline after <|im_end|> is not generated, and nothing follows the trained part.
        assert text(sample, tokenizer) == rendered.removesuffix("\n")
        assert end == len(content.tokens)
    assert messages == given_messages


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(conversations(), st.sampled_from(["stripping", "marked", "plain"]))
def test_both_expansions_train_the_same_text_once(
    tokenizers: dict[str, Any], messages: list[dict[str, Any]], name: str
) -> None:
    tokenizer = tokenizers[name]
    turns = samples(chat(messages), tokenizer, expand="turns")
    whole = samples(chat(messages), tokenizer)
    of_turns = [part for sample in turns for part in trained_texts(sample, tokenizer)]
    assert [part for sample in whole for part in trained_texts(sample, tokenizer)] == of_turns
    # Only the plain template never rewrites earlier turns, so only there one sample has the whole conversation.
    if name == "plain":
        assert len(whole) == 1
        last = tokenizer.apply_chat_template(messages, tokenize=False)
        assert text(whole[0], tokenizer) == last.removesuffix("\n")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(conversations())
def test_marks_and_differences_agree(tokenizers: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    # The two templates print the same text; one has generation marks, the other is compared with its prompt.
    for expand in ("turns", "trajectory"):
        marked = samples(chat(messages), tokenizers["marked"], expand=expand)
        plain = samples(chat(messages), tokenizers["stripping"], expand=expand)
        for one, other in zip(marked, plain, strict=True):
            assert one.trajectory_id == other.trajectory_id
            np.testing.assert_array_equal(tokens_of(one).tokens, tokens_of(other).tokens)
            np.testing.assert_array_equal(trained_of(one), trained_of(other))


# The template "stripping" drops r1 and r2 once the user asks Q2: the turns A1 and A2 extend each other, A3 does not.
THINKING = [
    user("Q1"),
    assistant("A1", reasoning_content="r1"),
    {"role": "tool", "content": "T1"},
    assistant("A2", reasoning_content="r2"),
    user("Q2"),
    assistant("A3", reasoning_content="r3"),
]


def test_turns_are_named_by_assistant_message_and_keep_all_fields(tokenizers: dict[str, Any]) -> None:
    item = chat(THINKING, weights=[0, 0, 0, 0.5, 0, 2], step=4, reward=1.0, advantage=-1.0, weight=3.0)
    turns = samples(item, tokenizers["stripping"], expand="turns")
    # The first assistant message (turn 0) has weight 0 and gives no sample.
    assert [turn.trajectory_id for turn in turns] == ["t/turn-1", "t/turn-2"]
    assert [tokens_of(turn).span_weights.tolist() for turn in turns] == [[0.5], [2.0]]
    for turn in turns:
        assert (turn.step, turn.reward, turn.advantage, turn.weight) == (4, 1.0, -1.0, 3.0)
        assert turn.group_id == turns[0].group_id


def test_messages_after_the_last_turn_stay_unless_they_rewrite_it(tokenizers: dict[str, Any]) -> None:
    trailing = [*THINKING[:2], {"role": "tool", "content": "T"}]
    (kept,) = samples(chat(trailing), tokenizers["stripping"])
    assert text(kept, tokenizers["stripping"]).endswith("A1<|im_end|>\n<|im_start|>tool\nT<|im_end|>\n")
    assert len(trained_texts(kept, tokenizers["stripping"])) == 1
    # The user message Q2 makes the template drop r1 and r2, so the text up to A2 cannot be continued by it.
    (cut,) = samples(chat(THINKING[:5]), tokenizers["stripping"])
    assert text(cut, tokenizers["stripping"]).endswith("A2<|im_end|>")
    expected = "messages after the last trained turn left out, because the template rewrites earlier turns"
    assert cut.notes == (expected,)


def test_groups_come_from_the_prompt_if_the_file_names_none(tokenizers: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    one, same, other, tooled = (
        samples(item, tokenizers["plain"])[0].group_id
        for item in (
            chat([user("Q"), assistant("a")]),
            chat([user("Q"), assistant("b"), user("c"), assistant("d")]),
            chat([user("R"), assistant("a")]),
            chat([user("Q"), assistant("a")], tools=tools),
        )
    )
    assert one == same
    assert len({one, other, tooled}) == 3
    assert samples(chat([user("Q"), assistant("a")]), tokenizers["plain"], tools=tools)[0].group_id == tooled
    ids = np.arange(4, dtype=np.int32)
    span = (np.array([2], np.int32), np.array([3], np.int32), np.ones(1))
    (sample,) = samples(Trajectory("t", "s", Tokens(ids, *span)), None)
    # The prompt is ids 0 and 1, before the first trained token, as little-endian int32.
    assert sample.group_id == derived_group(b"\x00\x00\x00\x00\x01\x00\x00\x00")
    assert (sample.group_id or "").startswith("prompt-")


def test_text_is_prompt_completion_and_the_end_token_once(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["none"]
    for completion in ("over the lazy dog.", "over the lazy dog.<|endoftext|>"):
        (sample,) = samples(Trajectory("t", "s", PromptCompletion("The quick ", completion)), tokenizer)
        assert text(sample, tokenizer) == "The quick over the lazy dog.<|endoftext|>"
        assert trained_texts(sample, tokenizer) == ["over the lazy dog.<|endoftext|>"]
    # Without a prompt the completion starts at position 0, which is not trained.
    (sample,) = samples(Trajectory("t", "s", PromptCompletion("", "fox")), tokenizer)
    assert tokens_of(sample).starts.tolist() == [1]
    assert sample.notes == ("the first token is not trained, because no token predicts it",)


def test_a_text_that_begins_with_the_first_token_of_a_sequence_gets_no_second_one(tmp_path: Path) -> None:
    backend = Tokenizer.from_file(f"{save(tmp_path, None)}/tokenizer.json")
    first = backend.token_to_id("<|im_start|>")
    backend.post_processor = processors.TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", first)])
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|endoftext|>")
    for prompt in ("The quick ", "<|im_start|>The quick "):
        (sample,) = samples(Trajectory("t", "s", PromptCompletion(prompt, "fox")), fast)
        assert text(sample, fast) == "<|im_start|>The quick fox<|endoftext|>"


@pytest.mark.parametrize("name", ["plain", "stripping", "marked"])
@pytest.mark.parametrize(
    ("content", "bounds", "expected", "is_noted"),
    [
        ("{x: 7}", AnswerBounds(prefill=3), " 7}<|im_end|>", PREFILL_NOTE),
        ("{x: 7}", AnswerBounds(prefill=4), "7}<|im_end|>", PREFILL_NOTE),
        ("Act: x", AnswerBounds(stop="Observation:"), "Act: x", STOP_NOTE),
        ("Act: x", AnswerBounds(stop=""), "Act: x", STOP_NOTE),
        ("Act: x", AnswerBounds(stop="<|im_end|>"), "Act: x<|im_end|>", None),
        ("Act: x", AnswerBounds(is_open=True), "Act: x", None),
        ("Act: x", AnswerBounds(prefill=4, stop="Observation:"), " x", STOP_NOTE),
    ],
)
def test_only_the_text_between_the_bounds_of_an_answer_is_trained(
    tokenizers: dict[str, Any], name: str, content: str, bounds: AnswerBounds, expected: str, is_noted: str | None
) -> None:
    tokenizer = tokenizers[name]
    item = chat([user("x: 7 {x: 7}"), assistant(content)])
    assert isinstance(item.content, Chat)
    item = replace(item, content=replace(item.content, message_bounds=[None, bounds]))
    (sample,) = samples(item, tokenizer)
    assert trained_texts(sample, tokenizer) == [expected]
    assert (is_noted in sample.notes) if is_noted else not {STOP_NOTE, PREFILL_NOTE} & set(sample.notes)


@pytest.mark.parametrize("completion", ["fox", "fox<|endoftext|>", "fox<|endoftext|>\n"])
def test_a_text_has_one_end_token_unless_it_is_cut(tokenizers: dict[str, Any], completion: str) -> None:
    tokenizer = tokenizers["none"]
    (whole,) = samples(Trajectory("t", "s", PromptCompletion("The ", completion)), tokenizer)
    (cut,) = samples(Trajectory("t", "s", PromptCompletion("The ", completion, is_cut=True)), tokenizer)
    assert text(whole, tokenizer).count("<|endoftext|>") == 1
    assert text(cut, tokenizer) == f"The {completion}"


def test_unusable_trajectories_are_skipped(tokenizers: dict[str, Any]) -> None:
    items: list[Trajectory | Skipped] = [chat([])]
    items += [chat([user("Q")]), chat([user("Q"), assistant("A")], weights=[0.0, 0.0]), Skipped("s", "r")]
    reasons = [item.reason for item in tokenize(items, tokenizer=tokenizers["plain"]) if isinstance(item, Skipped)]
    assert reasons == ["empty trajectory", "no trained token", "no trained token", "r"]


def test_text_needs_a_tokenizer_and_a_conversation_a_template(
    tokenizers: dict[str, Any], names: dict[str, str]
) -> None:
    item = chat([user("Q"), assistant("A")])
    with pytest.raises(TreepackError) as caught:
        samples(item, None)
    assert str(caught.value) == "r.jsonl:1: contains text, not token ids; give --tokenizer NAME"
    with pytest.raises(TreepackError) as caught:
        samples(item, tokenizers["none"])
    expected = f"{names['none']}: the tokenizer has no chat template; give one (--chat-template FILE), use a tokenizer "
    expected += "that has one, or token ids"
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    "name", ["tau-bench-airline/gpt-4o-airline.json.gz", "swe-agent-lite/cost_2_1", "toolbench-dfsdt"]
)
def test_real_rollouts_are_tokenised(tokenizers: dict[str, Any], name: str) -> None:
    from support.read_rollouts import read_trajectories

    path = REAL / name
    if not path.exists():
        pytest.skip(f"no real rollouts at {path}")
    read = list(islice((item for item in read_trajectories([path]) if isinstance(item, Trajectory)), NUM_REAL))
    assert len(read) == NUM_REAL
    tokenizer = tokenizers["plain"]
    for item, sample in zip(read, tokenize(read, tokenizer=tokenizer), strict=True):
        assert isinstance(sample, Trajectory)
        assert isinstance(item.content, Chat)
        messages = zip(item.content.messages, item.content.message_weights, strict=True)
        answers = [message for message, weight in messages if weight]
        parts = trained_texts(sample, tokenizer)
        assert len(parts) == len(answers)
        for part, message in zip(parts, answers, strict=True):
            assert part.startswith(message["content"])
            assert part.endswith("<|im_end|>")
            for call in message.get("tool_calls", []):
                assert call["function"]["arguments"] in part
        assert json.dumps(sample.metadata)
