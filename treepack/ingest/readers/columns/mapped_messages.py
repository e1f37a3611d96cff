"""Messages of a record of a homemade layout, with the roles and parts that a `ColumnMap` names."""

from __future__ import annotations

import json
from typing import Any

from treepack.errors import TreepackError
from treepack.files.input_files.json_text import parsed_json
from treepack.ingest.column_map import IN_MESSAGES, WHERE, ColumnMap
from treepack.ingest.readers.fields.field_paths import GONE, MISSING, value_at, without_paths
from treepack.ingest.readers.fields.values import JsonObject, is_messages, quoted
from treepack.ingest.readers.messages.containers import objects_of
from treepack.ingest.readers.messages.normal_form import RENAMED_ROLES, ROLES

# Names of roles that many data sets have, in lower case.
ROLE_NAMES = {
    **dict.fromkeys("human prompter".split(), "user"),
    **dict.fromkeys("gpt chatgpt bot ai model".split(), "assistant"),
    **dict.fromkeys("observation tool_response tool_result function_response".split(), "tool"),
}
_MESSAGE_NAMES = {"calls": "tool_calls", "reasoning": "reasoning_content", "call_id": "tool_call_id"}


class MappedConversation:
    """Converts the messages of one record; remembers the paths that were found in any of them."""

    def __init__(self, source: str, columns: ColumnMap) -> None:
        self.source, self._columns = source, columns
        keys = (*IN_MESSAGES, "mask")
        self._paths = {key: columns.paths[key][0] for key in keys if key in columns.paths}
        self._found: set[str] = set()
        self._num = 0
        self.took_mask = False

    @property
    def has_parts(self) -> bool:
        """True if the map names parts of messages or roles."""
        return bool(self._paths or self._columns.roles)

    def messages(self, value: Any) -> list[JsonObject] | None:
        """Return the messages of `value`, or None if it is not a list of objects, also not as JSON text."""
        value = as_messages(value)
        if value is None:
            return None
        return [self._message(each, f"{self.source}: message {i}") for i, each in enumerate(value, 1)]

    def answer(self, value: Any) -> list[JsonObject] | str | None:
        """Return one answer: text, messages, or a single message; None if it is neither."""
        if isinstance(value, str) and not self.is_talk(value):
            return value
        if isinstance(value, dict):
            role = self._paths["role"].steps if "role" in self._paths else ("role",)
            has_role = value_at(value, role) is not MISSING
            value = [value if has_role else {"role": "assistant"} | value]
        return self.messages(value)

    def answers(self, value: Any) -> Any:
        """Return the texts or messages that are JSON text under a name such as `responses`; other values unchanged."""
        parsed = parsed_json(value) if self._has_plural() else None
        is_texts = isinstance(parsed, list) and all(isinstance(each, str) for each in parsed)
        return parsed if is_texts or self.is_talk(parsed) else value

    def has_answers(self, messages: list[JsonObject]) -> bool:
        """Return True if each of `messages`, under a name such as `responses`, is a separate answer."""
        return self._has_plural() and all(each.get("role") == "assistant" for each in messages)

    def _has_plural(self) -> bool:
        *_, name = [step for step in self._columns.paths["answer"][0].steps if isinstance(step, str)] or [""]
        return name.endswith("s")

    def is_talk(self, value: Any) -> bool:
        """Return True if `value` is messages, each of which has a role, as it is or as JSON text."""
        messages = as_messages(value)
        role = self._paths["role"].steps if "role" in self._paths else ("role",)
        return bool(messages) and all(value_at(each, role) is not MISSING for each in messages or ())

    def prompt(self, value: Any) -> list[JsonObject] | str | None:
        """Return a prompt: text or messages; None if it is neither."""
        if isinstance(value, str) and not self.is_talk(value):
            return value
        return self.messages(value)

    def notes(self) -> list[str]:
        """Return a note for each path that no message of the record has."""
        absent = [key for key in self._paths if key not in self._found and key != "mask"]
        return [f"column {key}={self._paths[key].text} in no message" for key in absent if self._num]

    def _message(self, message: JsonObject, where: str) -> JsonObject:
        self._num += 1
        values = {key: value_at(message, path.steps) for key, path in self._paths.items()}
        values = {key: value for key, value in values.items() if value is not MISSING}
        self._found.update(values)
        rest = without_paths(message, [self._paths[key].steps for key in values])
        rest = {} if rest is GONE else rest
        fields = {_MESSAGE_NAMES.get(key, key): value for key, value in values.items() if key != "mask"}
        if "mask" in values:
            fields["trainable" if isinstance(values["mask"], bool) else "weight"] = values["mask"]
        for name in fields.keys() & rest.keys():
            if rest[name] not in (None, "", []):
                raise TreepackError(f"{where} has the field {name} beside the column of {WHERE}; map or ignore it")
        if "role" in fields or "role" in rest:
            fields["role"] = self._role(fields.get("role", rest.get("role")), where)
        # Trajectories of SWE-agent on the hub have the text of the system message in a separate field.
        if fields.get("role") == "system" and not fields.get("content") and isinstance(rest.get("system_prompt"), str):
            fields["content"] = rest.pop("system_prompt")
        return rest | fields

    def _role(self, role: Any, where: str) -> Any:
        name = role if isinstance(role, str) else json.dumps(role) if isinstance(role, bool | int) else None
        if name is None:
            return role
        known = self._columns.roles.get(name) or ROLE_NAMES.get(name.lower())
        lower = name.lower()
        if known is None and lower not in ROLES and lower not in RENAMED_ROLES:
            raise TreepackError(
                f"{where} has role {quoted(name)}; expected system, user, assistant or tool, or add user={name}, "
                f"tool={name} or assistant={name} to {WHERE}"
            )
        return known or lower


def as_messages(value: Any) -> list[JsonObject] | None:
    """Return a list of objects, given as it is, as JSON text, or as a list of JSON texts; None if it is none."""
    return value if is_messages(value) else None if isinstance(value, dict) else objects_of(value)
