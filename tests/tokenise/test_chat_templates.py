"""Chat templates: tool calls in the text, the trained part of the text, refusals and skips."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from support.byte_tokenizer import PLAIN, save
from support.read_rollouts import read_trajectories, tokenize
from support.tokenised_chats import assistant, samples, text, trained_texts, user
from treepack.errors import TreepackError
from treepack.tokenise.tokenization import load_tokenizer
from treepack.trajectory import Chat, Skipped, Trajectory


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(save(tmp_path_factory.mktemp("bare"), None))


def with_template(tokenizer: Any, template: Any) -> Any:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def chat(messages: list[dict[str, Any]], **more: Any) -> Trajectory:
    weights = [float(message["role"] == "assistant") for message in messages]
    return Trajectory("t", "r.jsonl:1", Chat(messages, weights, **more))


def refusal(item: Trajectory, tokenizer: Any) -> str:
    with pytest.raises(TreepackError) as caught:
        samples(item, tokenizer)
    return str(caught.value)


def skip(item: Trajectory, tokenizer: Any) -> Skipped:
    (skipped,) = tokenize([item], tokenizer=tokenizer)
    assert isinstance(skipped, Skipped)
    assert skipped.source == item.source
    assert skipped.group_id is not None
    return skipped


# A template is START + a rendering of `call` + END: <|im_start|>content, f and arguments, <|im_end|> for each message.
START = "{% for message in messages %}<|im_start|>{{ message.content }}{% for call in message.tool_calls or [] %}f "
END = "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def calling(arguments: Any, **more: Any) -> Trajectory:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return chat([user("Q"), assistant("", tool_calls=[call])], **more)


@pytest.mark.parametrize(
    ("rendering", "expected"),
    [
        ("{{ call.function.arguments }}", '{"a": "é"}'),
        ("{{ call.function.arguments | tojson }}", '{"a": "é"}'),
        ("{{ '' + call.function.arguments }}", '{"a": "é"}'),
        ("{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }}{% endfor %}", "a=é"),
    ],
)
@pytest.mark.parametrize("arguments", ['{"a": "é"}', {"a": "é"}])
def test_tool_call_arguments_take_the_form_that_the_template_renders(
    bare: Any, rendering: str, expected: str, arguments: Any
) -> None:
    tokenizer = with_template(bare, START + rendering + END)
    (sample,) = samples(calling(arguments), tokenizer)
    assert trained_texts(sample, tokenizer) == ["f " + expected + "<|im_end|>"]


def insists(condition: str) -> str:
    """Return a template's beginning that refuses messages or tools unless `condition` is true."""
    return "{% if not (" + condition + ") %}{{ raise_exception('no') }}{% endif %}"


@pytest.mark.parametrize(
    "condition",
    [
        # Each condition refuses some of the probes, so that another probe must decide: tools needed, system message
        # needed or forbidden, no message of the user after a call, ids of nine characters, this one function only.
        "tools",
        "not tools or tools[0].function.name == 'f' or messages[0].role == 'system'",
        "messages[0].role != 'system'",
        "messages[0].role == 'system' or messages[0].content == 'Q'",
        "messages | map(attribute='tool_calls', default=[]) | map('length') | sum < 1 or messages[-1].role != 'user'",
        "not messages[-1].tool_calls or messages[-1].content == '' and messages[-1].tool_calls[0].id | length == 9",
        "not messages[-1].tool_calls or messages[-1].tool_calls[0].function.name == 'f'",
    ],
)
@pytest.mark.parametrize("rendering", ["{{ call.function.arguments }}", "{{ call.function.arguments | tojson }}"])
@pytest.mark.parametrize("arguments", ['{"a": "é"}', {"a": "é"}])
def test_arguments_are_never_printed_twice_encoded_whatever_a_template_insists_on(
    bare: Any, condition: str, rendering: str, arguments: Any
) -> None:
    tokenizer = with_template(bare, insists(condition) + START + rendering + END)
    (sample,) = samples(calling(arguments, tools=TOOLS), tokenizer)
    assert trained_texts(sample, tokenizer) == ['f {"a": "é"}<|im_end|>']


def test_a_call_without_an_id_gets_one_that_every_template_takes(bare: Any, tmp_path: Path) -> None:
    condition = "not messages[-1].tool_calls or messages[-1].tool_calls[0].id | length == 9"
    tokenizer = with_template(bare, insists(condition) + START + "{{ call.function.arguments }}" + END)
    path = tmp_path / "r.jsonl"
    call = {"name": "f", "arguments": {"a": 1}}
    path.write_text(json.dumps({"messages": [user("Q"), assistant("", tool_calls=[call])]}))
    (sample,) = tokenize(read_trajectories([path]), tokenizer=tokenizer)
    assert isinstance(sample, Trajectory)
    assert trained_texts(sample, tokenizer) == ['f {"a": 1}<|im_end|>']


def test_each_of_several_templates_is_probed(bare: Any) -> None:
    # The default template wants text, the one for tools wants an object; both print the same.
    templates = {
        "default": START + "{{ call.function.arguments }}" + END,
        "tool_use": START + "{{ call.function.arguments | tojson }}" + END,
    }
    tokenizer = with_template(bare, templates)
    for tools in (None, TOOLS):
        for arguments in ('{"a": 1}', {"a": 1}):
            (sample,) = samples(calling(arguments, tools=tools), tokenizer)
            assert trained_texts(sample, tokenizer) == ['f {"a": 1}<|im_end|>']


def test_a_conversation_is_skipped_only_if_its_calls_are_not_printed(bare: Any) -> None:
    silent = with_template(bare, START + END)
    samples(chat([user("Q"), assistant("A")]), silent)
    sentence = "r.jsonl:1: the chat template does not print the arguments of tool calls{}; "
    sentence += "use another template (--chat-template FILE; docs/templates.md compares many), or remove the tool calls"
    assert skip(calling("{}"), silent).detail == sentence.format("")
    assert skip(calling("{}"), silent).reason == "the chat template does not print the arguments of tool calls"
    strict = with_template(bare, START + "{{ raise_exception('no calls') }}" + END)
    assert skip(calling("{}"), strict).detail == sentence.format(" (no calls)")


def test_arguments_nested_too_deeply_to_be_parsed_stay_text(bare: Any) -> None:
    tokenizer = with_template(bare, START + "{{ call.function.arguments | tojson }}" + END)
    # json.loads raises RecursionError for this text; Python 3.13 has room for 5,000 levels.
    deep = "[" * 20_000 + "]" * 20_000
    (sample,) = samples(calling(deep), tokenizer)
    assert trained_texts(sample, tokenizer) == ["f " + json.dumps(deep) + "<|im_end|>"]


def test_a_tokenizer_without_a_default_template_is_refused(bare: Any) -> None:
    tokenizer = with_template(bare, {"rag": PLAIN, "tool_use": PLAIN})
    expected = (
        f"{bare.name_or_path}: none of the chat templates rag, tool_use is named default; rename one to default, "
    )
    expected += "or give one (--chat-template FILE)"
    for tools in (None, TOOLS):
        assert refusal(chat([user("Q"), assistant("A")], tools=tools), tokenizer) == expected


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("1 // 0", "ZeroDivisionError: integer division or modulo by zero"),
        ("'%(a)s' % {}", "KeyError: 'a'"),
        ("'{}'.format()", "IndexError: tuple index out of range"),
        ("10.0 ** 1000", "OverflowError: (34, 'Numerical result out of range')"),
        ("missing.field", "'missing' is undefined"),
    ],
)
def test_any_exception_of_a_template_is_one_sentence(bare: Any, expression: str, reason: str) -> None:
    tokenizer = with_template(bare, "{{ " + expression + " }}")
    skipped = skip(chat([user("Q"), assistant("A")]), tokenizer)
    assert skipped.reason == "the chat template refuses the messages"
    assert skipped.detail == (
        f"r.jsonl:1: turn 1 (message 2): the chat template refuses the messages ({reason}); "
        "fix them or use another template (--chat-template FILE; docs/templates.md compares many)"
    )


def test_a_template_that_never_ends_is_one_sentence(bare: Any) -> None:
    tokenizer = with_template(bare, "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")
    assert "refuses the messages (RecursionError: " in skip(chat([user("Q"), assistant("A")]), tokenizer).detail


def test_variables_of_the_template_come_from_the_record(bare: Any, tmp_path: Path) -> None:
    # Qwen3's templates work like this: with enable_thinking false, the prompt ends with an empty thought.
    no = "{% if enable_thinking is false %}<no>{% endif %}"
    answer = "{% if m.role == 'assistant' %}" + no + "{% endif %}{{ m.content }}"
    prompt = "{% if add_generation_prompt %}<|im_start|>" + no + "{% endif %}"
    tokenizer = with_template(bare, "{% for m in messages %}<|im_start|>" + answer + "<|im_end|>{% endfor %}" + prompt)
    value: dict[str, Any] = {"messages": [user("Q"), assistant("A")]}
    lines = [value, value | {"chat_template_kwargs": {"enable_thinking": False}}]
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    plain, without = tokenize(read_trajectories([path]), tokenizer=tokenizer)
    assert isinstance(plain, Trajectory)
    assert isinstance(without, Trajectory)
    assert text(plain, tokenizer) == "<|im_start|>Q<|im_end|><|im_start|>A<|im_end|>"
    assert text(without, tokenizer) == "<|im_start|>Q<|im_end|><|im_start|><no>A<|im_end|>"
    assert trained_texts(without, tokenizer) == ["A<|im_end|>"]
    assert plain.group_id != without.group_id


def test_a_template_that_prints_the_date_is_noted(bare: Any) -> None:
    dated = with_template(bare, "{{ strftime_now('%d %B %Y') }}" + START + END)
    item = chat([user("Q"), assistant("A")])
    assert samples(item, dated)[0].notes == ("the chat template prints today's date",)
    assert samples(item, with_template(bare, START + END))[0].notes == ()


@pytest.mark.parametrize("expand", ["trajectory", "turns"])
def test_a_beginning_token_of_the_template_is_there_once(bare: Any, expand: str) -> None:
    tokenizer = with_template(bare, "{{ bos_token }}" + START + END)
    tokenizer.bos_token = "<|endoftext|>"
    # The tokenizer must not add a second beginning to the one that the template prints.
    turns = samples(chat([user("Q"), assistant("A"), user("R"), assistant("B")]), tokenizer, expand=expand)
    for sample in turns:
        assert text(sample, tokenizer).startswith("<|endoftext|><|im_start|>Q")
        assert text(sample, tokenizer).count("<|endoftext|>") == 1
    assert [part for sample in turns for part in trained_texts(sample, tokenizer)] == ["A<|im_end|>", "B<|im_end|>"]


def test_the_trained_part_ends_with_the_end_of_turn_or_else_with_the_text(bare: Any) -> None:
    # Whitespace after a special token is not generated; other text is, up to the last character.
    for end, expected in (("<|im_end|> \n", "A<|im_end|>"), ("\n", "A\n"), ("<|im_end|>.", "A<|im_end|>.")):
        tokenizer = copy.deepcopy(bare)
        tokenizer.chat_template = "{% for m in messages %}[{{ m.content }}" + end.replace("\n", "{{ '\n' }}")
        tokenizer.chat_template += "{% endfor %}{% if add_generation_prompt %}[{% endif %}"
        (sample,) = samples(chat([user("Q"), assistant("A")]), tokenizer)
        assert trained_texts(sample, tokenizer) == [expected]


def test_several_marks_in_a_turn_are_several_spans(bare: Any) -> None:
    tokenizer = copy.deepcopy(bare)
    mark = "{% generation %}{{ m.content }}{% endgeneration %}"
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}[" + mark + "|" + mark + "]"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    (sample,) = samples(chat([user("Q"), assistant("A"), user("R"), assistant("B")]), tokenizer)
    assert trained_texts(sample, tokenizer) == ["A", "A", "B", "B"]
    # The text ends with the last trained character, before the bracket.
    assert text(sample, tokenizer) == "Q[A|A]R[B|B"


@pytest.mark.parametrize(
    ("template", "reason", "sentence"),
    [
        (
            "{{ raise_exception('no system') }}",
            "the chat template refuses the messages",
            "the chat template refuses the messages (no system); "
            "fix them or use another template (--chat-template FILE; docs/templates.md compares many)",
        ),
        (
            "{% if add_generation_prompt %}[prompt]{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}",
            "the chat template does not continue its own generation prompt",
            "the chat template does not continue its own generation prompt; "
            "use a template that does (--chat-template FILE), or one with {% generation %} marks",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% if m.role == 'x' %}{% generation %}{% endgeneration %}"
            "{% endif %}{% endfor %}",
            "the chat template puts no usable generation marks",
            "the chat template puts no generation mark on this turn; mark every assistant turn",
        ),
        (
            "{{ messages | length }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
            "{% endfor %}",
            "the chat template puts no usable generation marks",
            "the chat template has generation marks that cannot be assigned to turns; mark each turn once",
        ),
    ],
)
def test_a_conversation_that_cannot_be_trained_on_is_skipped_with_a_reason(
    bare: Any, template: str, reason: str, sentence: str
) -> None:
    skipped = skip(chat([user("Q"), assistant("A")]), with_template(bare, template))
    assert skipped.reason == reason
    assert skipped.detail == f"r.jsonl:1: turn 1 (message 2): {sentence}"


def test_a_template_with_bad_syntax_is_refused_at_once(bare: Any) -> None:
    tokenizer = with_template(bare, "a\n{% for %}")
    expected = "the chat template is not valid Jinja (line 2: Expected an expression, got 'end of statement block'); "
    expected += "fix it, or give another one (--chat-template FILE)"
    assert refusal(chat([user("Q"), assistant("A")]), tokenizer) == f"{bare.name_or_path}: {expected}"
