"""Made-up messages, and the samples that the tokenisation makes of a trajectory."""

from __future__ import annotations

from typing import Any

from support.read_rollouts import tokenize
from support.readings import tokens_of
from treepack.trajectory import Trajectory


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def samples(item: Trajectory, tokenizer: Any, **options: Any) -> list[Trajectory]:
    """The samples of `item`, none of which is skipped."""
    items = list(tokenize([item], tokenizer=tokenizer, **options))
    assert all(isinstance(one, Trajectory) for one in items)
    return items  # type: ignore[return-value]


def trained_texts(item: Trajectory, tokenizer: Any) -> list[str]:
    content = tokens_of(item)
    spans = zip(content.starts.tolist(), content.ends.tolist(), strict=True)
    return [tokenizer.decode(content.tokens[start:end]) for start, end in spans]


def text(item: Trajectory, tokenizer: Any) -> str:
    return str(tokenizer.decode(tokens_of(item).tokens))
