"""The reward of a single response: a user's function as the episode of a sampler.

single_turn(score, query, tokenizer)  ->  SingleTurn, which calls score("4", {"answer": 4}, ids=[23, 2])
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.rollout.episode import SingleTurn
from treepack.rollout.query import Query
from treepack.rollout.user_code import call, name_of_code
from treepack.trajectory import Int32

RewardFunction = Callable[..., "float | Awaitable[float | None] | None"]


def single_turn(function: RewardFunction | None, query: Query, tokenizer: Any = None) -> SingleTurn:
    """Return the episode of a prompt with one response, whose reward is `function(response_text, fields, ids=ids)`.

    `response_text` is decoded without special tokens; it is None without a tokenizer. `fields` come from the query's
    record. `ids` is a list of all token ids of the response. For a prefix, text and ids include the part of the
    response that the prompt contains. The function is plain or asynchronous; plain ones run in worker threads. It may
    return None for no reward, and a bool counts as 1 or 0. Without a function no response has a reward.

    The rewards of the episode raise TreepackError if the function raises or returns something else.
    """
    if function is None:
        return SingleTurn()

    async def score(response: Int32) -> float | None:
        ids = response.tolist()
        text = None if tokenizer is None else _decode(tokenizer, ids)
        value = await call(function, text, dict(query.fields), ids=ids, where=query.where)
        return checked_reward(value, f"{query.where}: {name_of_code(function)}")

    return SingleTurn(score)


def checked_reward(value: Any, where: str) -> float | None:
    """Return a reward as a float, or None.

    Raises:
        TreepackError: it is not a finite number, with `where`.
    """
    if value is None:
        return None
    if not isinstance(value, numbers.Real | np.bool_):
        raise TreepackError(f"{where} returned a reward of type {type(value).__name__}; expected a number or None")
    number = float(value)
    if not math.isfinite(number):
        raise TreepackError(f"{where} returned the reward {number}; expected a finite number or None")
    return number


def _decode(tokenizer: Any, ids: list[int]) -> str:
    # The tokenizers of treepack.ingest have a backend; that of a test may be anything that decodes.
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    return str(backend.decode(ids, skip_special_tokens=True))
