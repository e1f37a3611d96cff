"""Logs of Tree of Thoughts: one record per puzzle, one trajectory per candidate of the search's last step.

    [{"idx": 900, "steps": [{"step": 0, "x": "4 5 6 10", "ys": [""], "new_ys": ["4 + 5 = 9\\n", ..], "values": [..],
                             "select_new_ys": [..]}, ..],
      "ys": [the answers], "infos": [{"r": 1}, ..]}]

Each y is the whole text so far, so candidates share the text of the thoughts that they extend. The puzzle is the
message of the user, and a candidate is the message of the assistant. The prompts of the search are not in the file.
The answers, which the last step selected, have the reward `r`, unless the log is old and has `accs` in place of
`infos`. Other candidates of that step have no reward. A candidate that was dropped earlier ends in the middle of a
solution and is left out. Logs of runs without a search do not contain the puzzle, and are skipped.
"""

from __future__ import annotations

from dataclasses import replace

from treepack.formats.kit import (
    Format,
    JsonObject,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    TreepackError,
    conversation,
    folder_and_document,
    objects_at,
    shown,
    without,
)
from treepack.ingest.readers.fields.values import as_texts

# Fields that become messages and rewards, and the cost of the whole run.
_USED = frozenset({"idx", "steps", "ys", "infos", "accs", "usage_so_far"})
_DROPPED_NOTE = "candidates that the search dropped before its last step not used"


def read_tree_of_thoughts(record: Record, options: ReadOptions) -> Outcomes:
    """Read the candidates of the last step, `<file>/<idx>/leaf-<k>` in their order, in the group `<folder>/<idx>`.

    The folder of such a file is named after the kind of puzzle, and `idx` counts the puzzles of that kind.

    Raises:
        TreepackError: steps, answers or rewards of a different kind.
    """
    value, source = record.value, record.source
    steps = objects_at(value, "steps", source)
    if not steps:
        yield Skipped(source, "no steps and therefore no puzzle, as in runs without a search")
        return
    puzzle = steps[-1].get("x")
    if not isinstance(puzzle, str):
        raise TreepackError(f"{source}: steps.x is {shown(puzzle)}; expected the text of the puzzle")
    # Every candidate of the last step is a leaf; earlier candidates are beginnings of these, or were dropped.
    leaves = as_texts(steps[-1].get("new_ys"), source=source, name="steps.new_ys")
    folder, stem = folder_and_document(record)
    group = f"{folder}/{value['idx']}" if folder else str(value["idx"])
    rewards = _rewards(value, source)
    # Dropped candidates are in the file but in no trajectory, so a note counts them.
    notes = (_DROPPED_NOTE,) if _has_dropped(steps, source) else ()
    values = steps[-1].get("values")
    for leaf, text in enumerate(leaves):
        messages = [{"role": "user", "content": puzzle}, {"role": "assistant", "content": text}]
        of_leaf = {
            **without(value, _USED),
            "trajectory_id": f"{stem}/{value['idx']}/leaf-{leaf}",
            "group_id": group,
            "reward": rewards.get(text),
            "value": values[leaf] if isinstance(values, list) and leaf < len(values) else None,
        }
        yield conversation(replace(record, value=of_leaf), messages, options, notes=notes)
        notes = ()  # counted once for each record


def _rewards(value: JsonObject, source: str) -> JsonObject:
    """Return the reward of each answer; answers with the same text have the same reward."""
    infos = objects_at(value, "infos", source)
    answers = as_texts(value["ys"], source=source, name="ys")
    if infos and len(infos) != len(answers):
        raise TreepackError(f"{source}: has {len(answers)} ys and {len(infos)} infos; expected one info per answer")
    return {answer: info.get("r") for answer, info in zip(answers, infos, strict=False)}


def _has_dropped(steps: list[JsonObject], source: str) -> bool:
    """Return whether a step before the last one made candidates that it did not select."""
    for step in steps[:-1]:
        # new_ys [a, b, c] and select_new_ys [a, c] -> b was dropped
        kept = set(as_texts(step.get("select_new_ys"), source=source, name="steps.select_new_ys"))
        if not kept.issuperset(as_texts(step.get("new_ys"), source=source, name="steps.new_ys")):
            return True
    return False


FORMAT = Format(
    name="tree-of-thoughts",
    rank=100,
    program="Tree of Thoughts",
    recognised_by="`idx`, `ys`, and `infos` or `accs`; and `steps` if there was a search",
    requires="idx, ys:list, infos|accs:list",
    used="idx steps.x steps.new_ys steps.values steps.select_new_ys ys infos.r",
    dropped="""
        steps.ys (the selection of the step before);
        accs (0 if nothing was evaluated);
        usage_so_far (of the whole run)
    """,
    keeps="rewards, lineage",
    read=read_tree_of_thoughts,
)
