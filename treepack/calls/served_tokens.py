"""Chat completions of servers: each by its messages, and by the token ids that a server may add.

served_call(response, choice, chat)     ids are in the response, in a choice, or in the names of tokens
read_served, read_choices               by ids if all calls have them, else by messages
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from treepack.calls.chat_calls import ChatCall, read_chats
from treepack.calls.conversations import with_notes
from treepack.calls.token_calls import TokenCall, read_calls
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields import endings
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.token_fields import KEPT_SETS
from treepack.ingest.readers.fields.values import JsonObject, is_messages, object_or_empty
from treepack.trajectory import Outcomes

_TOKEN_ID = "token_id:"
SOME_NOTE = "token ids of some calls only, not used"
_LOGPROBS_NOTE = "log-probabilities without token ids not used"


@dataclass(frozen=True, slots=True)
class ServedCall:
    """A call by its messages, and by its token ids if the server added them; it may have log-probabilities only."""

    chat: ChatCall
    tokens: TokenCall | None = None
    has_logprobs: bool = False


def read_served(record: Record, calls: Sequence[ServedCall], options: ReadOptions) -> Outcomes:
    """Yield the trajectories of a rollout with these `calls`, by their token ids if all of them have some."""
    tokens = [call.tokens for call in calls if call.tokens is not None]
    if tokens and len(tokens) == len(calls):
        yield from read_calls(record, tokens, options)
        return
    notes = (SOME_NOTE,) if tokens else (_LOGPROBS_NOTE,) if any(call.has_logprobs for call in calls) else ()
    yield from with_notes(read_chats(record, [call.chat for call in calls], options), notes)


def read_choices(record: Record, name: str, calls: Sequence[ServedCall], options: ReadOptions) -> Outcomes:
    """Read each choice of the call `name` as a rollout; several choices are a group."""
    # "c" with 2 choices -> rollouts "c/choice-0" and "c/choice-1" of the group "c"
    several = {"group_id": name} | record.value if len(calls) > 1 else record.value
    for number, call in enumerate(calls):
        own = f"{name}/choice-{number}" if len(calls) > 1 else name
        yield from read_served(replace(record, value=several | {"rollout_id": own}), [call], options)


def served_call(response: JsonObject, choice: JsonObject, chat: ChatCall) -> ServedCall:
    """Return the call `chat`, which is a `choice` of `response`, with its token ids."""
    tokens = token_call(response, choice, chat.temperature)
    tokens = None if tokens is None else replace(tokens, name=chat.name)
    return ServedCall(chat, tokens, bool(_token_parts(choice)))


def token_call(response: JsonObject, choice: JsonObject, temperature: float | None = None) -> TokenCall | None:
    """Return the call of a `choice` of `response` by its token ids; None if the server added none."""
    message, extra = (object_or_empty(choice.get(name)) for name in ("message", "provider_specific_fields"))
    parts = _token_parts(choice)
    # vLLM adds the ids to the response and the choice, LiteLLM to provider_specific_fields, NeMo to the message.
    holders = (response, choice, extra, message)
    prompt = next((holder["prompt_token_ids"] for holder in holders if holder.get("prompt_token_ids")), None)
    generated = next((holder["token_ids"] for holder in (choice, extra) if holder.get("token_ids")), None)
    generated = generated or message.get("generation_token_ids") or _ids_of_names(parts)
    if not prompt or not generated:
        return None
    logprobs = message.get("generation_log_probs") or [part.get("logprob") for part in parts]
    values = {"rollout_log_probs": logprobs, "temperatures": temperature}
    kept = next((holder[name] for holder in (choice, extra, message) for name in KEPT_SETS if holder.get(name)), None)
    return TokenCall(prompt, generated, values, ending=endings.raw_of(choice), kept=kept)


def _token_parts(choice: JsonObject) -> list[JsonObject]:
    """Return the log-probabilities of the tokens of a choice."""
    parts = object_or_empty(choice.get("logprobs")).get("content")
    return parts if is_messages(parts) else []


def _ids_of_names(parts: list[JsonObject]) -> list[int]:
    # ["token_id:5", "token_id:6"] -> [5, 6], and ["token_id:5", "Hi"] -> []
    names = [part.get("token") for part in parts]
    numbers = [name.removeprefix(_TOKEN_ID) for name in names if isinstance(name, str) and name.startswith(_TOKEN_ID)]
    return [int(number) for number in numbers if number.isdecimal()] if len(numbers) == len(names) else []
