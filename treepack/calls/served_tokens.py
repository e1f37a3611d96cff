"""Token ids that a server adds to a chat completion: in the response, in a choice, or as names of tokens."""

from __future__ import annotations

from typing import Any

from treepack.calls.token_calls import TokenCall
from treepack.ingest.readers.fields import endings
from treepack.ingest.readers.fields.token_fields import KEPT_SETS
from treepack.ingest.readers.fields.values import JsonObject, is_messages, object_or_empty

_TOKEN_ID = "token_id:"
SOME_NOTE = "token ids of some calls only, not used"
LOGPROBS_NOTE = "log-probabilities without token ids not used"


def token_call(
    response: JsonObject, choice: JsonObject, temperature: float | None = None, name: Any = None
) -> TokenCall | None:
    """Return the call of a `choice` of `response` by its token ids; None if the server added none."""
    message, extra = (object_or_empty(choice.get(name)) for name in ("message", "provider_specific_fields"))
    parts = token_parts(choice)
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
    return TokenCall(prompt, generated, values, ending=endings.raw_of(choice), kept=kept, name=name)


def token_parts(choice: JsonObject) -> list[JsonObject]:
    """Return the log-probabilities of the tokens of a choice."""
    parts = object_or_empty(choice.get("logprobs")).get("content")
    return parts if is_messages(parts) else []


def _ids_of_names(parts: list[JsonObject]) -> list[int]:
    # ["token_id:5", "token_id:6"] -> [5, 6], and ["token_id:5", "Hi"] -> []
    names = [part.get("token") for part in parts]
    numbers = [name.removeprefix(_TOKEN_ID) for name in names if isinstance(name, str) and name.startswith(_TOKEN_ID)]
    return [int(number) for number in numbers if number.isdecimal()] if len(numbers) == len(names) else []
