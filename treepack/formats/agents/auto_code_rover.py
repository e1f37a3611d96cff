"""Files `conversation_round_<k>.json` of AutoCodeRover: an array of messages, the whole conversation up to round k.

    <task>_2024-04-06_13-51-50/
        conversation_round_0.json        [{"role": "system", "content": ".."}, {"role": "user", "content": ".."}, ..]
        conversation_round_1.json        the same and the result of round 0, and so on
        debug_agent_write_patch_1.json   the last round under another system prompt, and then the patch

The last round contains all earlier rounds, so these are skipped. Other conversations of the folder repeat messages of
the last round under another system prompt; they do not train these messages again. Any file that is one array of
messages is read in this way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice, takewhile
from pathlib import Path

from treepack.files.input_files.record_files import read_records
from treepack.formats.kit import (
    STDIN,
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    describe,
    folder_and_document,
)
from treepack.ingest.readers.messages.normal_form import normalise_messages

# "conversation_round_12.json.gz" -> 12, and "sympy__sympy-1_2024-04-06_13-51-50" -> "sympy__sympy-1"
_ROUND = re.compile(r"conversation_round_(\d+)\.json(\.gz|\.zst)?")
_TIME = re.compile(r"_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d$")
# A record with any other field is in a different format.
_FIELDS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name"})


def _is_rover_message(record: JsonObject) -> bool:
    """Return whether `record` is nothing but a message."""
    role, content = record.get("role"), record.get("content")
    return (
        record.keys() <= _FIELDS and isinstance(role, str) and "content" in record and isinstance(content, str | None)
    )


def _read_auto_code_rover(records: Iterator[Record], options: ReadOptions) -> Outcomes:
    """Read the one trajectory of a file, named after its folder, and after the file too if it is not a round.

    The group is the name of the folder without the time at its end.

    Raises:
        TreepackError: an element is not a message.
    """
    rows = list(records)
    path = rows[0].path
    record = Record(path, path, {})
    messages = [row.value for row in rows]
    rounds = _rounds(path)
    this_round = _ROUND.fullmatch(Path(path).name)
    # Round 2 of rounds 0, 1, 2, 3 -> the path of round 3.
    later = next((each for number, each in rounds if this_round is not None and number > int(this_round[1])), None)
    if later is not None and _num_shared(messages, later) == len(messages):
        yield Skipped(path, f"beginning of {later.name}", is_rollout=False)
        return
    done = normalise_messages(messages, source=path)
    num_shared = 0
    if this_round is None and rounds and messages[0].get("role") == "system":
        # The system prompts differ, so the comparison starts after them: [S', a, b, patch] and [S, a, b] -> 1 + 2.
        num_shared = 1 + _num_shared(messages[1:], rounds[-1][1], start=1)
    # <task>_<time>/conversation_round_3.json -> "<task>_<time>", other files -> "<task>_<time>/<file>"
    folder, stem = folder_and_document(record)
    name = "/".join(part for part in (folder, "" if this_round is not None and folder else stem) if part)
    value = {"trajectory_id": name, "group_id": _TIME.sub("", folder) or stem}
    yield describe(Record(path, path, value), done.chat(num_shared), used=(), options=options, notes=done.notes)


def _rounds(path: str) -> list[tuple[int, Path]]:
    """Return the number and the path of each round in the folder of the file at `path`, in order."""
    if path == STDIN:
        return []
    named = ((_ROUND.fullmatch(each.name), each) for each in Path(path).parent.iterdir())
    return sorted((int(match[1]), each) for match, each in named if match is not None)


def _num_shared(messages: list[JsonObject], path: Path, *, start: int = 0) -> int:
    """Count how many first `messages` equal the messages of the file at `path` from number `start` on."""
    others = islice(read_records(str(path)), start, None)
    pairs = zip(map(_known, messages), (_known(record.value) for record in others), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _known(message: JsonObject) -> JsonObject:
    """Return the fields of `message` that are read; a note names any other."""
    return {name: field for name, field in message.items() if name in _FIELDS}


FORMAT = Format(
    name="auto-code-rover",
    rank=50,
    program="AutoCodeRover",
    recognised_by="an array of messages, or one message per line: `role` and `content`, perhaps a tool call",
    requires=_is_rover_message,
    checked="first",
    used="role content tool_calls tool_call_id",
    dropped="rounds before the last (beginnings of it)",
    keeps="masks, lineage",
    needs_folder=True,
    read_file=_read_auto_code_rover,
)
