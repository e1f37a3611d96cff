"""Append-only sequences: their text and their sums equal the ones of conversations put together by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import real_templates
from support.byte_tokenizer import PLAIN, STRIPPING, save
from support.oracle_append_only import append_only_sections, chatml, ids_of_sections, qwen
from support.read_rollouts import tokenize
from support.strategies import make
from treepack.ingest.conversation_counts import conversations_of_log
from treepack.ingest.read_log import ReadLog
from treepack.tokenise.append_only import append_only_text, turn_totals
from treepack.tokenise.chat_template import ChatTemplate
from treepack.tokenise.tokenization import TokenisationJob, TrajectoryTokeniser, load_tokenizer
from treepack.trajectory import Chat, Tokens, Trajectory

Message = dict[str, Any]
Print = Callable[[list[Message]], str]

PRINTED: dict[str, Print] = {"plain": chatml, "stripping": chatml, "qwen2_5": qwen, "qwen3": qwen}
KEEPS_HISTORY = ("plain", "qwen2_5")
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("append-only")
    names = {"plain": save(folder / "plain", PLAIN), "stripping": save(folder / "stripping", STRIPPING)}
    names |= {name: real_templates.save(name, folder / name) for name in ("qwen2_5", "qwen3", "gptoss")}
    return {name: load_tokenizer(path) for name, path in names.items()}


words = st.text(st.sampled_from("ab.é"), min_size=1, max_size=6)


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    messages: list[Message] = [{"role": "user", "content": draw(words)}]
    for number in range(draw(st.integers(1, 4))):
        message: Message = {"role": "assistant", "content": draw(words)}
        if draw(st.booleans()):
            message["reasoning_content"] = draw(words)
        answers = draw(st.sampled_from(["user", "tool", "tools"]))
        if answers != "user":
            call = {"name": "f", "arguments": {"x": 1}}
            message["tool_calls"] = [{"id": f"c{number}", "type": "function", "function": call}]
        result = {"role": answers.removesuffix("s"), "content": draw(words)}
        messages += [message, *([result, result] if answers == "tools" else [result])]
    return [*messages, {"role": "assistant", "content": draw(words)}]


def chat_of(messages: list[Message]) -> Chat:
    return Chat(messages, [float(message["role"] == "assistant") for message in messages], TOOLS)


def samples_of(messages: list[Message], tokenizer: Any, expand: str) -> list[Trajectory]:
    samples = list(tokenize([Trajectory("t", "s", chat_of(messages))], tokenizer=tokenizer, expand=expand))
    assert all(isinstance(sample, Trajectory) for sample in samples)
    return samples  # type: ignore[return-value]


def tokens_of(sample: Trajectory) -> Tokens:
    assert isinstance(sample.content, Tokens)
    return sample.content


@settings(max_examples=40)
@given(conversations(), st.sampled_from(list(PRINTED)), st.sampled_from(["trajectory", "turns"]))
def test_sums_are_those_of_the_sequence_made_by_hand(
    tokenizers: dict[str, Any], messages: list[Message], name: str, expand: str
) -> None:
    tokenizer = tokenizers[name]
    ids, trained = ids_of_sections(tokenizer, append_only_sections(tokenizer, messages, TOOLS, PRINTED[name]))
    first, *others = samples_of(messages, tokenizer, expand)
    assert not any(sample.totals for sample in others)
    sums = {name.removeprefix("append_only_"): value for name, value in first.totals.items() if "append" in name}
    expected = {"sequences": 1, "tokens": len(ids), "pairs": sum(range(len(ids) + 1)), "targets": sum(trained)}
    assert sums == expected
    assert len(ids) >= max(len(tokens_of(sample).tokens) for sample in (first, *others))


@settings(max_examples=25)
@given(conversations(), st.sampled_from(KEEPS_HISTORY))
def test_a_trajectory_of_a_template_that_keeps_history_is_its_append_only_sequence(
    tokenizers: dict[str, Any], messages: list[Message], name: str
) -> None:
    tokenizer = tokenizers[name]
    ids, trained = ids_of_sections(tokenizer, append_only_sections(tokenizer, messages, TOOLS, PRINTED[name]))
    (sample,) = samples_of(messages, tokenizer, "trajectory")
    content = tokens_of(sample)
    assert content.tokens.tolist() == ids
    spans = zip(content.starts.tolist(), content.ends.tolist(), strict=True)
    assert [k for start, end in spans for k in range(start, end)] == [k for k, each in enumerate(trained) if each]


@settings(max_examples=25)
@given(conversations(), st.sampled_from(list(PRINTED)))
def test_the_text_is_that_of_the_sequence_made_by_hand(
    tokenizers: dict[str, Any], messages: list[Message], name: str
) -> None:
    template, chat = ChatTemplate(tokenizers[name]), chat_of(messages)
    turns = template.turns(chat, tools=TOOLS, source="s").turns
    expected = append_only_sections(tokenizers[name], messages, TOOLS, PRINTED[name])

    def render(some: list[Message], prompt: bool) -> str:
        return template.whole(replace(chat, messages=some), tools=TOOLS, source="s", prompt=prompt)

    sequence = append_only_text(chat, turns, render, template.special_tokens)
    assert sequence is not None
    text, spans = sequence
    assert text == "".join(section for section, _ in expected)
    assert [text[start:end] for start, end, _ in spans] == [section for section, is_trained in expected if is_trained]
    num_parts = turn_totals(turns)["parts"]
    assert (num_parts == 1) == (text == str(turns[-1].text))


def test_another_end_token_in_the_middle_of_a_conversation_is_no_obstacle(tokenizers: dict[str, Any]) -> None:
    # gpt-oss ends the last answer with <|return|>, and earlier ones with <|end|>.
    messages = [
        {"role": role, "content": f"{role}{i}."} for i, role in enumerate(["user", "assistant", "user", "assistant"])
    ]
    template, chat = ChatTemplate(tokenizers["gptoss"]), Chat(messages, [0.0, 1.0, 0.0, 1.0])

    def render(some: list[Message], prompt: bool) -> str:
        return template.whole(replace(chat, messages=some), tools=None, source="s", prompt=prompt)

    turns = template.turns(chat, tools=None, source="s").turns
    sequence = append_only_text(chat, turns, render, template.special_tokens)
    assert sequence is not None
    assert sequence[0].endswith(
        "<|start|>user<|message|>user0.<|end|><|start|>assistant<|channel|>final<|message|>assistant1.<|return|>"
        "<|start|>user<|message|>user2.<|end|><|start|>assistant<|channel|>final<|message|>assistant3.<|return|>"
    )


def test_a_template_that_prints_results_inside_the_turn_of_their_call_has_no_sequence(tmp_path: Path) -> None:
    # Gemma 4 prints the result of a call before the text of the turn that called.
    tokenizer = load_tokenizer(real_templates.save("gemma4", tmp_path))
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages: list[Message] = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "name": "f", "content": "R"},
        {"role": "assistant", "content": "B"},
    ]
    samples = samples_of(messages, tokenizer, "turns")
    sums = samples[0].totals
    # The longest sample is counted for the sequence.
    assert (sums["append_only_sequences"], sums["append_only_absent"]) == (1, 1)
    assert sums["append_only_tokens"] == max(len(tokens_of(sample).tokens) for sample in samples)


def test_the_log_of_reading_counts_conversations_samples_and_the_reason(tokenizers: dict[str, Any]) -> None:
    turns: list[Message] = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A", "reasoning_content": "r"},
    ]
    items = [Trajectory("chat", "r.jsonl:1", chat_of([*turns, *turns, *turns])), make("ids", [5, 6, 7, 8])]
    log = ReadLog()
    tokenise = TrajectoryTokeniser(TokenisationJob(tokenizers["stripping"]))
    samples = [sample for item in items for _, made in tokenise.record([item]) for sample in log.add(item, made)]
    totals = {"num_trajectories": len(samples), "tokens_flat": sum(len(tokens_of(each).tokens) for each in samples)}
    read = conversations_of_log(log, totals)
    assert read is not None
    assert (read.num_conversations, read.num_rollouts, read.num_samples) == (1, 2, 4)
    assert (read.num_turns, read.num_parts, read.num_split) == (3, 3, 1)
    assert read.append_only.num_sequences == 2
    # The sample of token ids, with 4 tokens and 10 pairs, is a sequence like that of the conversation.
    sums = samples[0].totals
    assert read.append_only.tokens == sums["append_only_tokens"] + 4
    assert read.append_only.pairs == sums["append_only_pairs"] + 10
