"""Samples of turns, made one by one, and made conversations of two turns."""

from __future__ import annotations

from dataclasses import replace

from support.strategies import make
from treepack.trajectory import Tokens, Trajectory


def one_per_turn(trajectory: Trajectory) -> list[Trajectory]:
    """Return the samples of a trajectory's turns, made one by one."""
    content = trajectory.content
    assert isinstance(content, Tokens)
    samples: list[Trajectory] = []
    first = 0
    for i, end in enumerate(content.ends.tolist()):
        if i + 1 < len(content.ends) and content.starts[i + 1] == end:
            continue  # spans that touch are one turn
        spans = slice(first, i + 1)
        turn = Tokens(content.tokens[:end], content.starts[spans], content.ends[spans], content.span_weights[spans])
        samples.append(replace(trajectory, trajectory_id=f"{trajectory.trajectory_id}/{i}", content=turn))
        first = i + 1
    return samples


def tokens_of(trajectory: Trajectory) -> Tokens:
    assert isinstance(trajectory.content, Tokens)
    return trajectory.content


def length(trajectory: Trajectory) -> int:
    return len(tokens_of(trajectory).tokens)


def turns_of_chats(num: int = 3) -> tuple[list[Trajectory], list[Trajectory]]:
    """Return conversations of one prompt whose last token is trained, and a sample for each of their turns."""
    # tokens   1 2 3 A 4 B 21     A = 10 + i and B = 20 + i differ between the chats
    # spans          -   ----     two turns, of 4 and 7 tokens
    chats = [
        make(f"t{i}", [1, 2, 3, 10 + i, 4, 20 + i, 21], spans=[(3, 4, 1.0), (5, 7, 1.0)], group=f"g{i}")
        for i in range(num)
    ]
    return chats, [turn for chat in chats for turn in one_per_turn(chat)]
