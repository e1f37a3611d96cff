"""Real chat templates: the exact text of conversations that their templates rewrite, and reasons for skipping others.

The templates are from trl. Expected texts are written by hand, with [[ ]] around each trained part.
"""

from __future__ import annotations

from typing import Any

import pytest

from support import real_templates
from support.read_rollouts import tokenize
from support.template_oracle import decode
from support.tokenised_chats import assistant, user
from treepack.tokenise.tokenization import load_tokenizer
from treepack.trajectory import Chat, Skipped, Trajectory

Message = dict[str, Any]

SCHEMA = {"type": "object", "properties": {"key": {"type": "string", "description": "d"}}}
TOOLS = [{"type": "function", "function": {"name": name, "description": "d", "parameters": SCHEMA}} for name in "fg"]
CLOSED = "thought opened by the generation prompt closed without reasoning, untrained"
SPLIT = "split where the template rewrites earlier turns"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("templates")
    names = (
        "qwen2_5 qwen3 qwen3_8 qwen3_5_nothink qwen3_training deepseekv3 deepseekv3_training deepseek_r1_distill "
        "gptoss gptoss_training nemotron_3_ultra gemma gemma4_v5 llama3_1 phi3 phi3_training smolvlm"
    ).split()
    return {name: load_tokenizer(real_templates.save(name, folder / name)) for name in names}


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def call(value: str, name: str = "f", number: int = 0) -> dict[str, Any]:
    function = {"name": name, "arguments": f'{{"key": "{value}"}}'}
    return {"id": f"abcdefgh{number}", "type": "function", "function": function}


def calling(*calls: dict[str, Any], content: str = "") -> Message:
    return assistant(content, tool_calls=list(calls))


def result(content: str, number: int = 0) -> Message:
    return {"role": "tool", "tool_call_id": f"abcdefgh{number}", "name": "f", "content": content}


def trajectory(messages: list[Message]) -> Trajectory:
    weights = [float(message["role"] == "assistant") for message in messages]
    tools = TOOLS if any("tool_calls" in message for message in messages) else None
    return Trajectory("t", "r.jsonl:1", Chat(messages, weights, tools))


def samples(tokenizer: Any, messages: list[Message]) -> list[Trajectory]:
    items = list(tokenize([trajectory(messages)], tokenizer=tokenizer))
    assert all(isinstance(item, Trajectory) for item in items), items
    return items  # type: ignore[return-value]


def skipped(tokenizer: Any, messages: list[Message]) -> Skipped:
    (item,) = tokenize([trajectory(messages)], tokenizer=tokenizer)
    assert isinstance(item, Skipped)
    return item


def marked_text(tokenizer: Any, sample: Trajectory) -> str:
    decoded = decode(tokenizer, sample)
    text, done = "", 0
    for start, end in decoded.spans:
        text += decoded.text[done:start] + "[[" + decoded.text[start:end] + "]]"
        done = end
    return text + decoded.text[done:]


def texts(tokenizer: Any, messages: list[Message]) -> list[str]:
    return [marked_text(tokenizer, sample) for sample in samples(tokenizer, messages)]


def ends(tokenizer: Any, messages: list[Message], header: str) -> list[str]:
    """Return the end of each sample, from the last `header` on, for templates whose prompts are long."""
    return [header + text.rpartition(header)[2] for text in texts(tokenizer, messages)]


QWEN_USER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
NO_THOUGHT = "<think>\n\n</think>\n\n"


def test_qwen3_reads_two_assistant_messages_in_a_row(tokenizers: dict[str, Any]) -> None:
    # The template prints an empty thought in the last message only, so the first one changes when the second follows.
    messages = [user("Q"), assistant("A"), assistant("B"), user("R"), assistant("C")]
    first, second = texts(tokenizers["qwen3"], messages)
    assert first == (
        QWEN_USER.format("Q") + f"[[{NO_THOUGHT}A<|im_end|>]]\n<|im_start|>assistant\n[[{NO_THOUGHT}B<|im_end|>]]"
    )
    history = "A<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n"
    assert second == QWEN_USER.format("Q") + history + QWEN_USER.format("R") + f"[[{NO_THOUGHT}C<|im_end|>]]"


def test_qwen3_reads_an_empty_turn_before_another_one(tokenizers: dict[str, Any]) -> None:
    (text,) = texts(tokenizers["qwen3"], [user("Q"), assistant(""), assistant("B")])
    assert text == (
        QWEN_USER.format("Q") + f"[[{NO_THOUGHT}<|im_end|>]]\n<|im_start|>assistant\n[[{NO_THOUGHT}B<|im_end|>]]"
    )


def special(name: str) -> str:
    return f"<\uff5c{name}\uff5c>"  # DeepSeek writes its tokens with a wide bar


BEGIN, END, ASKED, ANSWERS = map(special, ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant"))


@pytest.mark.parametrize("name", ["deepseekv3", "deepseek_r1_distill"])
def test_a_thought_that_the_prompt_opens_is_closed_untrained_if_none_is_recorded(
    tokenizers: dict[str, Any], name: str
) -> None:
    items = samples(tokenizers[name], [user("Q"), assistant("A"), user("R"), assistant("B")])
    assert [marked_text(tokenizers[name], item) for item in items] == [
        f"{BEGIN}{ASKED}Q{ANSWERS}<think>\n\n</think>\n\n[[A{END}]]",
        f"{BEGIN}{ASKED}Q{ANSWERS}A{END}{ASKED}R{ANSWERS}<think>\n\n</think>\n\n[[B{END}]]",
    ]
    assert [item.notes for item in items] == [(CLOSED, SPLIT), ()]


@pytest.mark.parametrize("name", ["deepseekv3", "deepseek_r1_distill"])
@pytest.mark.parametrize(
    "turn",
    [
        assistant("A", reasoning_content="Why"),
        assistant("<think>\nWhy\n</think>\n\nA"),
        assistant("Why\n</think>\n\nA"),
        assistant("<think>\nWhy\n</think>\n\nA", reasoning_content="Why"),
    ],
)
def test_recorded_reasoning_continues_the_thought_that_the_prompt_opens(
    tokenizers: dict[str, Any], name: str, turn: Message
) -> None:
    (sample,) = samples(tokenizers[name], [user("Q"), turn])
    text = marked_text(tokenizers[name], sample)
    assert text == f"{BEGIN}{ASKED}Q{ANSWERS}<think>\n[[Why\n</think>\n\nA{END}]]"
    assert sample.notes == ()


CALLS, CALLS_END = special("tool▁calls▁begin"), special("tool▁calls▁end")
RESULTS, RESULTS_END = special("tool▁outputs▁begin"), special("tool▁outputs▁end")


def deepseek_call(value: str) -> str:
    begin, sep, end = map(special, ("tool▁call▁begin", "tool▁sep", "tool▁call▁end"))
    return f'{begin}function{sep}f\n```json\n{{"key": "{value}"}}\n```{end}'


def deepseek_result(text: str) -> str:
    return special("tool▁output▁begin") + text + special("tool▁output▁end")


def test_r1_reads_tool_calls_and_ends_the_turn_of_a_single_call(tokenizers: dict[str, Any]) -> None:
    # The template prints calls only if the content is None, and ends a turn only after its second call.
    messages = [user("Q"), calling(call("1")), result("T"), assistant("B")]
    first, second = texts(tokenizers["deepseek_r1_distill"], messages)
    one = CALLS + deepseek_call("1")
    assert first == f"{BEGIN}{ASKED}Q{ANSWERS}<think>\n\n</think>\n\n[[{one}{CALLS_END}{END}]]"
    assert second == f"{BEGIN}{ASKED}Q{ANSWERS}{one}{RESULTS}{deepseek_result('T')}{RESULTS_END}[[B{END}]]"


@pytest.mark.parametrize("name", ["deepseekv3", "deepseekv3_training"])
def test_deepseek_reads_the_text_and_the_call_of_a_later_turn(tokenizers: dict[str, Any], name: str) -> None:
    # In the history, the template prints a later turn without its text and without the beginning of its calls.
    messages = [user("Q"), calling(call("1")), result("T"), calling(call("2"), content="Again"), result("U")]
    *_, last = texts(tokenizers[name], messages)
    begin = f"{BEGIN}{ASKED}Q{ANSWERS}{CALLS}{deepseek_call('1')}{CALLS_END}{END}{RESULTS}{deepseek_result('T')}"
    if name == "deepseekv3_training":  # its samples continue each other, and its marks include the header
        begin = begin.replace(ANSWERS, "[[" + ANSWERS).replace(END, END + "]]")
    assert last == f"{begin}{RESULTS_END}[[Again{CALLS}{deepseek_call('2')}{CALLS_END}{END}]]"


GPT = "<|start|>user<|message|>Q<|end|>"


@pytest.mark.parametrize("name", ["gptoss", "gptoss_training"])
def test_gptoss_reads_a_call_with_text_whose_channel_is_dropped_later(tokenizers: dict[str, Any], name: str) -> None:
    # The final message makes the template drop the analysis of the call, but the sampler of that message saw it.
    messages = [user("Q"), calling(call("1"), content="Look"), result("T"), assistant("B")]
    (text,) = ends(tokenizers[name], messages, GPT)
    # The marks of the training template include the header of the turn; the rebuilt second turn has none.
    header = "<|start|>assistant[[" if name == "gptoss" else "[[<|start|>assistant"
    look = "<|channel|>analysis<|message|>Look<|end|><|start|>assistant"
    one = ' to=functions.f<|channel|>commentary json<|message|>{"key": "1"}<|call|>]]'
    answer = '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"T"<|end|>'
    final = "<|start|>assistant[[<|channel|>final<|message|>B<|return|>]]"
    assert text == f"{GPT}{header}{look}{one}{answer}{final}"


def test_gptoss_returns_in_the_last_message_and_ends_in_the_history(tokenizers: dict[str, Any]) -> None:
    first, second = ends(tokenizers["gptoss"], [user("Q"), assistant("A"), user("R"), assistant("B")], GPT)
    channel = "<|channel|>final<|message|>"
    assert first == f"{GPT}<|start|>assistant[[{channel}A<|return|>]]"
    history = f"<|start|>assistant{channel}A<|end|><|start|>user<|message|>R<|end|>"
    assert second == f"{GPT}{history}<|start|>assistant[[{channel}B<|return|>]]"


def test_a_thought_is_closed_as_the_template_closes_thoughts(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["nemotron_3_ultra"]
    header = "<|im_start|>assistant\n"
    assert ends(tokenizer, [user("Q"), assistant("A")], header) == [header + "<think>\n</think>[[A<|im_end|>]]"]
    thinking = [user("Q"), assistant("A", reasoning_content="Why")]
    assert ends(tokenizer, thinking, header) == [header + "<think>\n[[Why</think>A<|im_end|>]]"]


@pytest.mark.parametrize(
    ("name", "turn"),
    [
        # Qwen3.8's template does not take the thought out of the content, and its prompt opens one.
        ("qwen3_8", assistant("<think>\nWhy\n</think>\n\nA")),
        ("qwen3_8", assistant("<think>\nWhy\n</think>\n\nA", reasoning_content="Why")),
        ("qwen3", assistant("<think>\nWhy\n</think>\n\nA", reasoning_content="Why")),
        ("qwen3_training", assistant("<think>\nWhy\n</think>\n\nA", reasoning_content="Why")),
    ],
)
def test_a_thought_inside_the_content_is_never_doubled(tokenizers: dict[str, Any], name: str, turn: Message) -> None:
    (text,) = ends(tokenizers[name], [user("Q"), turn], "<|im_start|>assistant\n")
    trained = text.replace("[[", "").replace("]]", "")
    assert trained.rstrip("\n") == "<|im_start|>assistant\n<think>\nWhy\n</think>\n\nA<|im_end|>"


def test_tags_that_are_no_thoughts_of_models_stay_text(tokenizers: dict[str, Any]) -> None:
    header = "<|im_start|>assistant\n"
    (text,) = ends(tokenizers["qwen3"], [user("Q"), assistant("<thought>Why</thought>A")], header)
    assert text == f"{header}[[{NO_THOUGHT}<thought>Why</thought>A<|im_end|>]]"


def test_reasoning_that_a_template_never_prints_is_noted(tokenizers: dict[str, Any]) -> None:
    (sample,) = samples(tokenizers["qwen2_5"], [user("Q"), assistant("A", reasoning_content="Why")])
    assert marked_text(tokenizers["qwen2_5"], sample).endswith("<|im_start|>assistant\n[[A<|im_end|>]]")
    assert sample.notes == ("reasoning left out, because the chat template does not print it",)


def test_a_template_that_joins_assistant_messages_is_read_turn_by_turn(tokenizers: dict[str, Any]) -> None:
    (text,) = texts(tokenizers["gemma4_v5"], [user("Q"), assistant("A"), assistant("B")])
    assert text == "<bos><|turn>user\nQ<turn|>\n<|turn>model\n[[A<turn|>]]\n<|turn>model\n[[B<turn|>]]"


def test_a_template_that_takes_content_in_parts_gets_parts(tokenizers: dict[str, Any]) -> None:
    (text,) = texts(tokenizers["smolvlm"], [user("Q"), assistant("A")])
    assert text == "<|im_start|>User: Q<end_of_utterance>\nAssistant:[[ A<end_of_utterance>]]"


def test_a_greeting_before_the_first_question_is_not_trained_if_its_prompt_is_refused(
    tokenizers: dict[str, Any],
) -> None:
    (sample,) = samples(tokenizers["qwen3"], [assistant("Hello"), user("Q"), assistant("A")])
    before = "<|im_start|>assistant\nHello<|im_end|>\n" + QWEN_USER.format("Q")
    assert marked_text(tokenizers["qwen3"], sample) == f"{before}[[{NO_THOUGHT}A<|im_end|>]]"
    expected = "assistant turn before the first user message not trained, because the chat template refuses its prompt"
    assert sample.notes == (expected,)


def test_marks_at_the_end_of_the_text_belong_to_the_last_turn(tokenizers: dict[str, Any]) -> None:
    (text,) = texts(tokenizers["phi3_training"], [user("Q"), assistant("A")])
    assert text == "<|user|>\nQ<|end|>\n<|assistant|>\n[[A<|end|>\n]][[<|endoftext|>]]"


OTHER = "use another template (--chat-template FILE; docs/templates.md compares many)"


@pytest.mark.parametrize(
    ("name", "messages", "reason", "where", "remedy"),
    [
        (
            "phi3",
            [user("Q"), calling(call("1"))],
            "the chat template does not print the arguments of tool calls",
            "r.jsonl:1",
            f"{OTHER}, or remove the tool calls",
        ),
        (
            "phi3",
            [user("Q"), assistant("f()"), result("T"), assistant("A")],
            "the chat template does not print the results of tool calls",
            "r.jsonl:1",
            f"{OTHER}, or remove them",
        ),
        (
            "gptoss",
            [user("Q"), calling(call("1"), call("2", "g", 1))],
            "the chat template prints only one tool call of a turn",
            "r.jsonl:1",
            f"{OTHER}, or split the turns with several calls",
        ),
        (
            "llama3_1",
            [user("Q"), assistant("A"), user("R"), calling(call("1"), content="Look")],
            "the chat template leaves out the text of a turn",
            "r.jsonl:1: turn 2 (message 4)",
            OTHER,
        ),
        (
            "deepseek_r1_distill",
            [user("Q"), calling(call("1"), content="Look")],
            "the chat template leaves out tool calls of a turn",
            "r.jsonl:1: turn 1 (message 2)",
            OTHER,
        ),
        (
            "deepseek_r1_distill",
            [user("Q"), calling(call("1"), call("2", "g", 1), call("3", "f", 2))],
            "the chat template ends a turn before its last text",
            "r.jsonl:1: turn 1 (message 2)",
            OTHER,
        ),
        (
            "qwen3_5_nothink",
            [user("Q"), assistant("A", reasoning_content="Why")],
            "the generation prompt of the chat template excludes the reasoning of a turn",
            "r.jsonl:1: turn 1 (message 2)",
            f"set chat_template_kwargs of the rollout, such as enable_thinking, or {OTHER}",
        ),
    ],
)
def test_a_conversation_that_a_template_does_not_print_whole_is_skipped(
    tokenizers: dict[str, Any], name: str, messages: list[Message], reason: str, where: str, remedy: str
) -> None:
    item = skipped(tokenizers[name], messages)
    assert item.reason == reason
    assert item.detail == f"{where}: {reason}; {remedy}"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([system("S"), user("Q"), assistant("A")], "System role not supported"),
        ([user("Q"), user("R"), assistant("A")], "Conversation roles must alternate user/assistant/user/assistant/..."),
    ],
)
def test_an_order_of_roles_that_a_template_refuses_is_a_skip(
    tokenizers: dict[str, Any], messages: list[Message], words: str
) -> None:
    item = skipped(tokenizers["gemma"], messages)
    assert item.reason == "the chat template refuses the messages"
    assert words in item.detail
