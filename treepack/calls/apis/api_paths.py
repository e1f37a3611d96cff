"""The fields of requests and responses that `api_forms` reads, as declared paths, whatever API they come from.

    requests("input")   -->  these, "input{}" (which may be JSON text), "input.tools", "input.messages.role", ..
    responses("output") -->  "output{}", "output.choices.finish_reason", "output.choices.message.role", ..

Texts of several words are searched in the trajectories wherever they are, so these paths decide about names, numbers
and single words only.
"""

from __future__ import annotations

from treepack.ingest.readers.fields.unread import below

_CALL = "id type name arguments args input function.name function.arguments".split()
_PART = (
    "type text thinking reasoning content refusal id name input modality tool_use_id is_error summary.text "
    "summary.type toolCallId toolName args output result arguments response thought"
).split()
_GEMINI = [
    f"{call}.{name}"
    for call in ("functionCall", "function_call", "functionResponse", "function_response")
    for name in ("id", "name", "args", "response")
]
_ENDINGS = "finish_reason finishReason stop_reason done_reason stop_sequence matched_stop".split()
# The items of the Responses API are among the messages: a call, and the result of one.
_ITEM = "call_id arguments input output action status summary.text".split()


_FIELDS = [
    *"prefix partial role type name content refusal reasoning_content reasoning tool_call_id is_error".split(),
    *("content{}", "parts{}", "tool_calls{}"),
    *below(["content", "parts"], [*_PART, *_GEMINI]),
    *below(["tool_calls"], _CALL),
    *below(["function_call"], ("name", "arguments")),
    *below(["additional_kwargs"], below(["tool_calls"], _CALL)),
    *below(["additional_kwargs"], ("function_call.name", "function_call.arguments", "reasoning_content")),
    *below(["response_metadata"], _ENDINGS),
    *_ENDINGS,
    *_ITEM,
]
# A message, also as LangChain wraps it.
_MESSAGE = [*_FIELDS, *below(["message", "kwargs", "data"], _FIELDS)]
_TOOLS = "tools functions".split()
_REQUEST = [
    *_MESSAGE,
    *_TOOLS,
    *"temperature prompt instructions input system args continue_final_message echo".split(),
    *("messages{}", "prompt{}", "input{}", "contents{}", "system{}"),
    *below(["messages", "prompt", "input", "contents"], _MESSAGE),
    *below(["prompt"], ("messages", *below(["messages"], _MESSAGE))),
    *below(["system", "instructions", "system_instruction", "systemInstruction"], _PART),
    *below(["system_instruction", "systemInstruction"], below(["parts"], _PART)),
    *below(
        ["config", "generation_config", "generationConfig"],
        (*_TOOLS, "temperature", "system_instruction", "systemInstruction"),
    ),
]
_RESPONSE = [
    *_MESSAGE,
    *"text completion reasoning reasoningText status incomplete_details.reason".split(),
    *("output{}", "toolCalls{}"),
    *below(["toolCalls"], _PART),
    *below(["output", "messages", "message", "generations"], _MESSAGE),
    *below(["generations"], ("text", *below(["generation_info"], _ENDINGS))),
    *below(["choices", "candidates"], ("text", *_ENDINGS, *below(["message", "content"], _FIELDS))),
]


def requests(path: str) -> list[str]:
    """Return the paths of a request at `path`, which may be messages, text, or JSON text."""
    return [path + "{}", *below([path], _REQUEST)]


def responses(path: str) -> list[str]:
    """Return the paths of a response at `path`, which may be a message, messages, text, or JSON text."""
    return [path + "{}", *below([path], _RESPONSE)]
