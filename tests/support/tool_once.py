"""An environment in which a tool answers the first turn, for the tests of integrations with trainers."""

from __future__ import annotations

from typing import Any

TOOL = [11, 12, 13]


class ToolOnce:
    """The reward is the number of tokens before the tool's answer, 0 if there is none."""

    def __init__(self, fields: dict[str, Any], tokenizer: Any) -> None:
        assert fields
        assert tokenizer.eos_token_id == 2
        self.turns: list[int] = []

    def prompt(self) -> None:
        """The trainer has the prompt."""

    def observe(self, ids: list[int], /) -> list[int] | None:
        """Return the tool's answer to the first turn."""
        self.turns.append(len(ids))
        return TOOL if len(self.turns) == 1 else None

    def reward(self) -> float:
        """Return the length of the first turn."""
        return float(self.turns[0]) if self.turns else 0.0
