"""Requests and responses of language models in the forms of many APIs and client libraries, as chat messages.

    text                                     "2 + 2?"                                       "4"
    OpenAI, chat completions                 [{role, content}], {messages, tools}           {choices: [{message}]}
    OpenAI, Responses                        [item], {input, instructions, tools}           {output: [item]}
    Anthropic                                {system, messages, tools}                      {role, content: [block]}
    Gemini                                   {contents, config or system_instruction}       {candidates: [{content}]}
    LangChain                                [message], [[message]], {messages}             {generations}, message
    OpenTelemetry                            [{role, parts}]                                [{role, parts}]
    AI SDK (Vercel)                          {prompt}, [{role, content: [part]}]            {text, toolCalls}, [call]

    request --prompt_of--> Prompt             response --responses_of--> one list of messages for each response

Either may be JSON text. An object of no known form is refused, and so is JSON text of one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from treepack.calls.apis.ai_sdk import has_sdk_parts, messages_of_sdk, messages_of_sdk_response, sdk_call
from treepack.calls.apis.exchanges import API_FIELDS
from treepack.calls.apis.langchain_messages import ROLES, chat_messages, generated
from treepack.calls.apis.otel_parts import messages_of_parts
from treepack.errors import TreepackError
from treepack.files.input_files.json_text import parsed
from treepack.ingest.readers.fields import endings
from treepack.ingest.readers.fields.rollout_facts import temperature_of
from treepack.ingest.readers.fields.values import JsonObject, is_messages, quoted, shown
from treepack.ingest.readers.messages.gemini_parts import gemini_messages, gemini_tools
from treepack.ingest.readers.messages.merged_turns import answered, left_over, merged_turns
from treepack.ingest.readers.messages.message_trees import RENAMED_ROLES as RENAMED
from treepack.ingest.readers.messages.normal_form import RENAMED_ROLES
from treepack.ingest.readers.messages.normal_form import ROLES as CHAT_ROLES
from treepack.ingest.readers.messages.prefills import mark_prefills
from treepack.ingest.readers.messages.reasoning import REASONING
from treepack.ingest.readers.messages.response_items import CALLS, RESULTS, messages_of_items

Message = JsonObject

_ITEM_TYPES = frozenset((*CALLS, *RESULTS, "reasoning", "message", "web_search_call", "file_search_call"))
# Fields of a message without which nothing is lost: ids, times, usage, and marks of the logger.
_HARMLESS = frozenset(
    "id type index created annotations logprobs usage model service_tier phase object event.name gen_ai.system "
    "gen_ai.message.index additional_kwargs response_metadata usage_metadata example status cache_control".split()
)
# Known fields of requests, besides the fields of OpenAI's APIs; ANSWERS in a request would be left out of the training.
_REQUEST_FIELDS = API_FIELDS | frozenset(
    "contents config generation_config generationConfig system_instruction systemInstruction system functions role "
    "function_call model metadata safety_settings safetySettings labels tool_config toolConfig thinking extra_body "
    "extra_headers top_k stop_sequences frequency_penalty presence_penalty logit_bias modalities args content name "
    "anthropic_version betas timeout max_retries http_options custom_llm_provider api_base continue_final_message "
    "add_generation_prompt echo".split()
)
_ANSWERS = frozenset("choices output completion completions response responses answer generations chosen".split())
_RESPONSE_FIELDS = API_FIELDS | frozenset(
    "id model type candidates generations content role stop_reason stop_sequence message finish_reason index "
    "finishReason usage_metadata usageMetadata model_version modelVersion sdk_http_response sdkHttpResponse "
    "automatic_function_calling_history response_id responseId create_time createTime llm_output run event.name "
    "gen_ai.system provider toolCalls tool_calls completion logprobs token_ids delta "
    "safety_ratings safetyRatings avg_logprobs avgLogprobs token_count tokenCount citation_metadata citationMetadata "
    "provider_specific_fields native_finish_reason done done_reason matched_stop".split()
)
_CALLING = frozenset({"tool_calls", "tool_use", "function_call", "tool-calls", "tool_call"})
_CUT = {"max_output_tokens": "length"}  # reasons of an incomplete response, by the names of chat completions
# Some tracers join the messages of a prompt with line feeds, so that their ends are lost.
_TRANSCRIPT = re.compile(r"(system|developer|user|assistant): ")
_NO_BEGINNING = "the prompt begins with the result of a tool"
_NO_CALLS = "a response that ends with a tool call has none"


@dataclass(frozen=True, slots=True)
class _RequestPrompt:
    """The messages of a request in chat form, and its tools and temperature if it has them."""

    messages: list[Message]
    tools: Any = None
    temperature: float | None = None


def prompt_of(value: Any, *, source: str) -> _RequestPrompt:
    """Return the prompt of a request, a list of messages, or text.

    Raises:
        TreepackError: it has no known form.
    """
    form = parsed(value)
    if isinstance(form, str) and _TRANSCRIPT.match(form):
        raise TreepackError(f"{source}: the prompt is a transcript, {shown(form)}; log the messages as a list")
    if isinstance(form, str):
        return _RequestPrompt([{"role": "user", "content": form}])
    if isinstance(form, dict):
        prompt = _prompt_of_object(form, source)
    elif isinstance(form, list):
        prompt = _prompt_of_list(form, source)
    else:
        prompt = None
    if prompt is None:
        raise TreepackError(f"{source}: the prompt is {shown(value)}; expected messages or text")
    if _begins_with_result(prompt.messages):
        raise TreepackError(f"{source}: {_NO_BEGINNING}; log the whole conversation as the prompt of each call")
    return prompt


def _begins_with_result(messages: Sequence[Message]) -> bool:
    """Return whether the messages before the first result of a tool are missing."""
    roles = (message.get("role") for message in messages)
    return next((role for role in roles if role != "system"), None) in ("tool", "function")


def _prompt_of_object(value: JsonObject, source: str) -> _RequestPrompt | None:
    found = _prompt_of_request(value, source)
    if found is None or not found.messages:
        return found
    if answers := [name for name in _ANSWERS & value.keys() if value[name]]:
        raise TreepackError(f"{source}: the prompt has {min(answers)}; expected a request without a response")
    *others, last = mark_prefills(found.messages, value, model=value.get("model"))
    return replace(found, messages=[*others, last | left_over(value, _REQUEST_FIELDS, "request")])


def _prompt_of_request(value: JsonObject, source: str) -> _RequestPrompt | None:
    temperature = temperature_of(value)
    tools = value.get("tools") or value.get("functions") or None
    if "contents" in value:
        config: JsonObject = next((value[name] for name in _CONFIG_NAMES if isinstance(value.get(name), dict)), {})
        holders = (value, config)
        system = next((each[name] for each in holders for name in _SYSTEM_NAMES if each.get(name)), None)
        declared = gemini_tools(next((each["tools"] for each in holders if each.get("tools")), None))
        heat = temperature if temperature is not None else temperature_of(config)
        return _RequestPrompt(gemini_messages(value["contents"], system, source), declared, heat)
    if "input" in value and ("instructions" in value or not isinstance(value["input"], dict)):
        items = messages_of_items(value["input"], source=source).messages
        return _RequestPrompt([*_system(value.get("instructions"), source), *items], tools, temperature)
    if "messages" in value or "prompt" in value:
        inner = prompt_of(value.get("messages", value.get("prompt")), source=source)
        messages = [*_system(value.get("system"), source), *inner.messages]
        return _RequestPrompt(messages, tools or inner.tools, temperature)
    if "role" in value:
        return _prompt_of_list([value], source)
    texts = value.get("args")  # of a call of the client in Python
    if isinstance(texts, list) and len(texts) == 1 and isinstance(texts[0], str) and len(value) == 1:
        return _RequestPrompt([{"role": "user", "content": texts[0]}])
    return None


_SYSTEM_NAMES = ("system_instruction", "systemInstruction")
_CONFIG_NAMES = ("config", "generation_config", "generationConfig")


def _system(system: Any, source: str) -> list[Message]:
    """Return the system prompt of a request, which is text or a list of text blocks."""
    if not system:
        return []
    if isinstance(system, str | list):
        return [{"role": "system", "content": system}]
    raise TreepackError(f"{source}: the system prompt is {shown(system)}; expected text")


def _prompt_of_list(value: list[Any], source: str) -> _RequestPrompt | None:
    if len(value) == 1 and isinstance(value[0], list):
        value = value[0]  # LangChain logs one list for each of several prompts
    if len(value) == 1 and isinstance(value[0], str):
        return _RequestPrompt([{"role": "user", "content": value[0]}])
    if not is_messages(value) or not value:
        return None
    if any("role" in each or "parts" in each or _is_other(each) for each in value):
        messages = list(_messages(value, source))
        # Langfuse logs the schemas of LangChain's tools as messages of role tool.
        schemas = [each["content"] for each in messages if _is_schema(each)]
        return _RequestPrompt(merged_turns([each for each in messages if not _is_schema(each)]), schemas or None)
    return None


def _is_other(message: Message) -> bool:
    """Return whether `message` is an item of the Responses API, or a message of LangChain."""
    kind = str(message.get("type"))
    return kind in _ITEM_TYPES or kind in ROLES or isinstance(message.get("kwargs"), dict)


def _is_schema(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, dict) and isinstance(content.get("function"), dict)


def _messages(values: list[Message], source: str) -> Iterator[Message]:
    """Yield the messages of a list in chat form; the results of tools become separate messages."""
    if any(str(each.get("type")) in _ITEM_TYPES - {"message"} for each in values):
        yield from messages_of_items(values, source=source).messages
        return
    calls: JsonObject = {}  # ids of calls by the name of the tool
    for value in values:
        for message in _message(value, source):
            role = message.get("role")
            # LangChain's callback for JavaScript writes the name of the tool as the role of its result.
            if isinstance(role, str) and role not in CHAT_ROLES and role not in RENAMED_ROLES and role in calls:
                message |= {"role": "tool", "name": role, "tool_call_id": calls[role]}
            for call in message.get("tool_calls") or ():
                function = call.get("function", call) if isinstance(call, dict) else {}
                if isinstance(function, dict) and isinstance(function.get("name"), str):
                    calls[function["name"]] = call.get("id")
            yield message


def _message(value: Message, source: str) -> list[Message]:
    inner = value.get("message")
    if isinstance(inner, dict) and "role" not in value:
        value = inner | {name: value[name] for name in ("finish_reason",) if value.get(name) is not None}
    parts = value.get("parts")
    if is_messages(parts):
        if all(isinstance(part.get("type"), str) for part in parts):
            return messages_of_parts([value], source, "messages")
        return gemini_messages([value], None, source)
    has_kwargs = isinstance(value.get("additional_kwargs"), dict)
    if value.get("role") is None or (has_kwargs and value["role"] != "tool"):
        if value.get("role") is None and not _is_other(value):
            raise TreepackError(f"{source}: has the message {shown(value)}; expected an object with a role")
        return chat_messages(value, source)
    done = {name: each for name, each in value.items() if name not in _HARMLESS}
    # A refusal is text that the model wrote, in place of the content.
    refusal = done.pop("refusal", None)
    if not done.get("content") and isinstance(refusal, str):
        done["content"] = refusal
    if (reason := endings.raw_of(value)) is not None:
        done["finish_reason"] = reason
        done.pop("stop_reason", None)
    content = done.get("content")
    if done.get("role") in ("tool", "function") and not _is_schema(done) and _is_data(content):
        done["content"] = json.dumps(content, ensure_ascii=False)
    return messages_of_sdk(done) if has_sdk_parts(content) else [done]


def _is_data(content: Any) -> bool:
    """Return whether `content`, the result of a tool, is an object or a list that a logger has parsed from its text."""
    has_types = is_messages(content) and all(isinstance(part.get("type"), str) for part in content)
    return isinstance(content, dict) or (isinstance(content, list) and len(content) > 0 and not has_types)


def responses_of(value: Any, *, source: str) -> list[list[Message]]:
    """Return the messages of each response to one prompt; all of them are the assistant's.

    Raises:
        TreepackError: the response has no known form, or ends with a tool call according to its reason, and has none.
    """
    form = parsed(value)
    if isinstance(form, dict):
        found = _responses_of_object(form, source)
    elif is_messages(form) and form:
        found = _responses_of_list(form, source)
    else:
        found = [[{"role": "assistant", "content": value}]] if isinstance(value, str) else None
    if found is None:
        raise TreepackError(f"{source}: the response is {shown(value)}; expected a message or text")
    done = [answered(merged_turns([_said(each, source) for each in response])) for response in found]
    for response in done:
        _check_calls(response, source)
    return done


def _said(message: Message, source: str) -> Message:
    role = message.get("role", "assistant")
    if role == "tool":  # a result among the parts of an answer
        return message
    if not isinstance(role, str) or RENAMED.get(role, role) != "assistant":
        raise TreepackError(f"{source}: the response has a message of role {quoted(role)}; expected the assistant's")
    return message | {"role": "assistant"}


def _check_calls(response: Sequence[Message], source: str) -> None:
    """Refuse a response whose tool calls the logger has put elsewhere, such as into its text."""
    reason = response[-1].get("finish_reason") if response else None
    in_parts = all(isinstance(each.get("content"), list) for each in response)
    parts = [part for each in response for part in each["content"]] if in_parts else []
    has_calls = any(each.get("tool_calls") or each.get("function_call") for each in response)
    has_blocks = any(isinstance(part, dict) and part.get("type") == "tool_use" for part in parts)
    if isinstance(reason, str) and reason in _CALLING and not has_calls and not has_blocks:
        raise TreepackError(f"{source}: {_NO_CALLS}; log its tool calls as tool_calls of the message")


def _responses_of_object(value: JsonObject, source: str) -> list[list[Message]] | None:
    found = _responses_of_response(value, source)
    if found and found[0] and "role" not in value:
        found[0][-1] = _with_rest(found[0][-1], value, "response")
    return found


def _with_rest(message: Message, value: JsonObject, name: str) -> Message:
    """Return the last `message` of a response or choice, with the fields of `value` beside it.

    {"text": "A.", "reasoning": "B."} has the thought beside the text; a message that has thoughts keeps its own. As an
    object, `reasoning` is a setting of the request.
    """
    has_own = not message.keys().isdisjoint(REASONING)
    beside = {} if has_own else {each: value[each] for each in REASONING if isinstance(value.get(each), str | list)}
    return beside | message | left_over(value, _RESPONSE_FIELDS | beside.keys(), name)


def _responses_of_response(value: JsonObject, source: str) -> list[list[Message]] | None:
    for name in ("choices", "candidates"):
        if is_messages(value.get(name)) and value[name]:
            return [_of_choice(each, source) for each in value[name]]
    if isinstance(value.get("output"), list):
        messages = messages_of_items(value["output"], source=source).messages
        details = value.get("incomplete_details")
        if messages and value.get("status") == "incomplete":
            reason = details.get("reason") if isinstance(details, dict) else None
            messages[-1]["finish_reason"] = _CUT.get(str(reason), reason or "length")
        return [messages]
    if isinstance(value.get("output"), dict):
        return _responses_of_response(value["output"], source)
    if isinstance(entries := value.get("generations"), list):
        lists = entries if all(isinstance(each, list) for each in entries) else [entries]
        found = [each for one in lists if is_messages(one) for each in one]
        return [_of_generation(each, source) for each in found] or None
    if isinstance(value.get("content"), dict) or isinstance(value.get("message"), dict):
        return [_of_choice(value, source)]
    if any(name in value for name in ("role", "content", "tool_calls")) or _is_other(value):
        return [_message(value if _is_other(value) else {"role": "assistant"} | value, source)]
    if isinstance(value.get("toolCalls", value.get("text")), str | list):
        return [list(messages_of_sdk_response(value))]
    for name in ("completion", "text"):
        if isinstance(value.get(name), str):
            return [[{"role": "assistant", "content": value[name]}]]
    if is_messages(value.get("messages")) and value["messages"]:
        return [_message(value["messages"][-1], source)]
    return None


def _of_generation(generation: JsonObject, source: str) -> list[Message]:
    """Return the messages of a generation of LangChain, with the reason why it ends if it has one beside them."""
    info = generation.get("generation_info")
    reason = endings.raw_of(info) if isinstance(info, dict) else None
    return endings.mark(chat_messages(generated(generation), source), reason)


def _of_choice(choice: JsonObject, source: str) -> list[Message]:
    """Return the messages of one choice or candidate, with the reason why it ends."""
    content = parsed(choice.get("message", choice.get("content")))
    if isinstance(content, dict):
        said = content if _is_other(content) else {"role": "assistant"} | content
        messages = gemini_messages([content], None, source) if "parts" in content else _message(said, source)
    elif isinstance(choice.get("text"), str):
        messages = [{"role": "assistant", "content": choice["text"]}]
    else:
        raise TreepackError(f"{source}: has the choice {shown(choice)}; expected a message")
    if messages:
        messages[-1] = _with_rest(messages[-1], choice, "choice")
    if messages and (reason := endings.raw_of(choice)) is not None:
        messages[-1].setdefault("finish_reason", reason.lower() if isinstance(reason, str) else reason)
    return messages


def _responses_of_list(values: list[Message], source: str) -> list[list[Message]] | None:
    if all("toolName" in each for each in values):
        return [[{"role": "assistant", "content": "", "tool_calls": [sdk_call(each) for each in values]}]]
    if all(isinstance(each.get("message"), dict) for each in values):
        return [_of_choice(each, source) for each in values]
    # OpenTelemetry logs one message for each response, other libraries one for each part of a response.
    if all(is_messages(each.get("parts")) for each in values):
        return [_message({"role": "assistant"} | each, source) for each in values]
    if any("role" in each or _is_other(each) for each in values):
        return [list(_messages(values, source))]
    if all(isinstance(each.get("type"), str) for each in values):
        return [[{"role": "assistant", "content": values}]]
    return None
