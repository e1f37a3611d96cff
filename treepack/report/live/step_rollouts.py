"""The rollouts of recent steps for the explorer: the trie of their packed rows.

    ScheduledRows, last step --read_steps--> StepRollouts      settings and blocks, as in the page about sharing

Steps are taken from the last one backwards while their rows have few tokens together; of a single step with more, the
first rows are taken. The step of a run is the training step of the explorer, so a group is named `brake (step 12)`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from treepack.errors import TreepackError
from treepack.report.contents import read_contents
from treepack.report.live.step_rows import ScheduledRows
from treepack.report.payload import explorer_settings, payload
from treepack.report.rebuilt import trie_of_rows
from treepack.report.rollouts import explorer_parts
from treepack.tokenise.saved_template import tokenizer_of

_MAX_STEPS = 8
MAX_TOKENS = 400_000  # of several steps: the explorer is ready in a second or two
MAX_STEP_TOKENS = 2_000_000  # of the only step


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """The explorer of the steps `first` to `last`: settings, blocks, and a sentence about its contents."""

    first: int
    last: int
    settings: dict[str, Any]
    blocks: dict[str, str]
    about: str

    def as_record(self) -> dict[str, Any]:
        """Return JSON values for the page."""
        return {
            "first": self.first,
            "last": self.last,
            "settings": self.settings,
            "blocks": self.blocks,
            "about": self.about,
        }


@dataclass(frozen=True, slots=True)
class RolloutTexts:
    """The tokenizer, None to show token ids; the limit, None for no text; and a remark for the reader."""

    tokenizer: Any
    limit: int | None
    remark: str = ""


def rollout_texts(rows: ScheduledRows, *, name: str | None, limit: int | None) -> RolloutTexts:
    """Return the texts of a run's rows, by the tokenizer `name` or the one that the rows were made with.

    Raises:
        TreepackError: `name` is given and cannot be loaded, or is another tokenizer.
    """
    if limit is None:
        return RolloutTexts(None, None, "This page contains no text (--no-text).")
    try:
        tokenizer = tokenizer_of(rows.manifest, name, where=rows.directory or "the run")
    except TreepackError as error:
        if name:
            raise
        return RolloutTexts(None, limit, f"The page shows token ids ({error}).")
    if tokenizer is None:
        return RolloutTexts(None, limit, "The page shows token ids, because no tokenizer is known (--tokenizer).")
    return RolloutTexts(tokenizer, limit)


def read_steps(rows: ScheduledRows, last: int, texts: RolloutTexts) -> StepRollouts:
    """Return the explorer of the steps up to `last`, counted from 1.

    Raises:
        TreepackError: the run has no such step, or a row cannot be read.
    """
    if not 1 <= last <= rows.num_steps:
        raise TreepackError(f"step {last} is not one of the {rows.num_steps:,} steps of the run")
    first, tokens = last, int(rows.num_tokens[rows.of_step(last)].sum())
    while first > 1 and last - first + 1 < _MAX_STEPS:
        more = int(rows.num_tokens[rows.of_step(first - 1)].sum())
        if tokens + more > MAX_TOKENS:
            break
        first, tokens = first - 1, tokens + more
    chosen, left_out, total = list[tuple[int, int]](), 0, 0
    for step in range(first, last + 1):
        for row in rows.of_step(step):
            total += int(rows.num_tokens[row])
            if chosen and total > MAX_STEP_TOKENS:
                left_out += 1
            else:
                chosen.append((step, row))
    trie = trie_of_rows(replace(rows.read(row), step=step) for step, row in chosen)
    lists = explorer_parts(trie)
    contents = read_contents(trie, texts.tokenizer, limit=texts.limit)
    shown = f"step {last:,}" if first == last else f"steps {first:,} to {last:,}"
    num_tokens = sum(int(rows.num_tokens[row]) for _, row in chosen)
    about = [f"Rollouts of {shown}, in {len(chosen):,} rows of {num_tokens:,} tokens."]
    if left_out:
        about.append(f"{left_out:,} more rows of the step are left out.")
    if contents.texts is not None and contents.texts.tokens_left_out:
        about.append(f"{contents.texts.tokens_left_out:,} tokens are left out (--text-limit).")
    about += [texts.remark] if texts.remark else []
    settings = explorer_settings(lists, contents)
    return StepRollouts(first, last, settings, payload(trie, lists, contents), " ".join(about))
