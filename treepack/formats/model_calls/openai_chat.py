"""Calls of a chat-completions API, logged as requests and responses (forms in `exchanges`), also by batch jobs.

    request  {"messages": [..], "tools": [..]}                  session "s"  call 1   call 2 ..
    response {"choices": [{"message": {..}, "logprobs": ..}]}   calls of one session that continue each other are joined

A server may add token ids, which are read in place of the text: vLLM adds `prompt_token_ids` and `token_ids`, LiteLLM
moves them to `provider_specific_fields`, and the tokens of log-probabilities may be named `token_id:17`. Several
choices of one request are a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from treepack.calls.apis.exchanges import ApiExchange, description, read_exchanges, request_and_response
from treepack.calls.served_tokens import ServedCall, read_choices, read_served, served_call
from treepack.formats.kit import (
    ChatCall,
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    TreepackError,
    endings,
    is_messages,
    mark_prefills,
    shown,
    skip_reason,
    temperature_of,
    with_notes,
)
from treepack.ingest.readers.messages.normal_form import READ
from treepack.ingest.readers.tokens.kept_fields import cut_note


def _is_chat_exchange(record: JsonObject) -> bool:
    """Return whether `record` is a request with messages, a response with choices, or both."""
    request, response = request_and_response(record)
    # A line of a batch's output has no request, and a failed line no choices.
    if "custom_id" in record and not response.get("choices"):
        failed = record.get("error") is not None or response.get("error") is not None
        return failed or is_messages(request.get("messages"))
    return is_messages(response.get("choices")) and ("custom_id" in record or is_messages(request.get("messages")))


def _read_openai_chat(records: Iterator[Record], options: ReadOptions) -> Outcomes:
    """Read the trajectories of the calls of one file. Calls without a session come first, sessions at the end.

    Raises:
        TreepackError: a record is not a call, or an error of `calls`.
    """
    sessions: dict[str, list[ApiExchange]] = {}
    for exchange in read_exchanges(records, asks="messages", answers="choices"):
        if isinstance(exchange, Skipped):
            yield exchange
        elif (reason := _skip_reason(exchange)) is not None:
            yield Skipped(exchange.record.source, reason)
        elif (session := exchange.session) is not None:
            sessions.setdefault(session, []).append(exchange)
        else:
            calls, name = _calls(exchange), exchange.name
            items = read_choices(description([exchange], name), name, calls, options)
            yield from with_notes(items, _cut_notes([exchange], calls))
    for name, exchanges in sessions.items():
        calls = [call for each in exchanges for call in _calls(each)]
        yield from with_notes(read_served(description(exchanges, name), calls, options), _cut_notes(exchanges, calls))


def _skip_reason(exchange: ApiExchange) -> str | None:
    messages = exchange.request["messages"]
    return skip_reason(messages) if is_messages(messages) else None


def _cut_notes(exchanges: Sequence[ApiExchange], calls: Sequence[ServedCall]) -> tuple[str, ...]:
    """Return a note about calls by token ids without kept sets, of a request with top-p, top-k or min-p."""
    has_all = all(call.tokens is not None and call.tokens.kept is None for call in calls)
    return next((note for each in exchanges if (note := cut_note(each.request))), ()) if has_all else ()


def _calls(exchange: ApiExchange) -> list[ServedCall]:
    """Return one call for each choice of the response."""
    source, request = exchange.record.source, exchange.request
    if not is_messages(exchange.response["choices"]) or not is_messages(request["messages"]):
        raise TreepackError(
            f"{source}: messages or choices are not lists of objects; expected a request and its response"
        )
    calls = []
    for number, choice in enumerate(exchange.response["choices"]):
        message = choice.get("message")
        if not isinstance(message, dict):
            raise TreepackError(f"{source}: a choice is {shown(choice)}; expected an object with a message")
        # The response of a server has more fields than a message of a prompt.
        said = {"role": "assistant"} | {name: field for name, field in message.items() if name in READ}
        tools, temperature = request.get("tools") or request.get("functions") or None, temperature_of(request)
        ending = endings.raw_of(choice)
        model = request.get("model") or exchange.response.get("model")
        prompt = mark_prefills(request["messages"], request, model=model)
        name = f"{exchange.response['id']}/{number}" if exchange.response.get("id") else None
        chat = ChatCall(prompt, [said], tools, temperature=temperature, ending=ending, name=name)
        calls.append(served_call(exchange.response, choice, chat))
    return calls


_USED = """
    request.messages request.tools request.temperature response.choices.message
    response.choices.logprobs.content response.prompt_token_ids response.choices.token_ids
    response.choices.sampling_mask=response.choices.token_ids response.id
    response.model session_id group_id reward response.body.model response.body.choices.message
    response.choices.finish_reason request.messages.* messages.* choices.*
""".split()
_SOMETIMES = (
    *("response.choices.stop_reason", "response.choices.matched_stop"),
    *("request.continue_final_message", "request.echo"),
)
FORMAT = Format(
    name="openai-chat",
    rank=540,
    program="OpenAI-compatible servers and proxies (chat completions), OpenAI batch jobs",
    recognised_by="a request with `messages` and a response with `choices`, or a line of a batch's input or output",
    requires=_is_chat_exchange,
    checked="none",
    used=_USED,
    # Both in one object.
    also=[*_SOMETIMES, *(path.removeprefix("request.").removeprefix("response.") for path in (*_USED, *_SOMETIMES))],
    dropped="""
        the other settings of request and response (usage);
        top_logprobs
    """,
    keeps="token ids, masks, log-probabilities, rewards, lineage",
    read_file=_read_openai_chat,
)
