"""A query: the token ids to continue, and everything about them that the records of its rollouts repeat."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from treepack.trajectory import Int32


@dataclass(frozen=True, slots=True)
class Query:
    """One prompt, or one prefix of an earlier rollout.

    Attributes:
        key: unique in a run. Seeds and `--resume` depend on it. It is the group_id of a prompt, and for a prefix
            "<rollout id>@<number of tokens>".
        group_id: group of the rollouts (GRPO's group).
        prompt: token ids to continue, int32 [n], at least one.
        count: rollouts wanted; None takes the number of the sampler.
        step: training step of the rollouts, or None.
        untrained_prefix: field of an augmented query: its first tokens are never trained.
        parent_rollout: rollout that a prefix was cut from, and None for a prompt.
        turns: spans [start, end) of `prompt` that the policy wrote, ascending; an environment replays them. A last span
            that ends the prompt is a turn that the rollouts continue.
        cuts: starts of the segments of the parent rollout inside `prompt`, ascending, with one id each in `cut_ids`.
        fields: further fields of its record, such as the solution of a task; rewards and environments read them, and
            records repeat the short ones.
        source: `file:line`, for errors.
    """

    key: str
    group_id: str
    prompt: Int32
    count: int | None = None
    step: int | None = None
    untrained_prefix: int | None = None
    parent_rollout: str | None = None
    turns: tuple[tuple[int, int], ...] = ()
    cuts: tuple[int, ...] = ()
    cut_ids: tuple[int, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)
    source: str = ""

    @property
    def where(self) -> str:
        """The query's name in errors."""
        return f"{self.source}: query {self.key}" if self.source else f"query {self.key}"

    @property
    def begun_turn(self) -> Int32:
        """Token ids of the policy's turn that the prompt leaves unfinished: its last span if it ends the prompt."""
        start = self.turns[-1][0] if self.turns and self.turns[-1][1] == len(self.prompt) else len(self.prompt)
        return self.prompt[start:]
