"""The reward of a single response: a user's function as the episode of a sampler.

single_turn(score, query, tokenizer)  ->  SingleTurn, which calls score("4", {"answer": 4}, ids=[23, 2])
as_reward(score)                      ->  the same for TRL's score(completions=["4"], answer=[4], **more)  ->  [1.0]
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.rollout.episode import SingleTurn
from treepack.rollout.query import Query
from treepack.rollout.user_code import call, name_of_code
from treepack.trajectory import Int32

_RewardFunction = Callable[..., "float | Awaitable[float | None] | None"]


def single_turn(function: _RewardFunction | None, query: Query, tokenizer: Any = None) -> SingleTurn:
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


def as_reward(function: Callable[..., Any]) -> _RewardFunction:
    """Return a reward function of either shape as one for `single_turn`, before anything is sampled.

    A function with an argument `completions` has TRL's shape: it gets lists of length 1, namely `completions`,
    `prompts`, `completion_ids` and every field of the prompt's record, as far as it names them or takes **kwargs. If
    the record has messages, prompt and completion are lists of messages, as in TRL.

    Raises:
        TreepackError: it takes other arguments.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function in C
        return function
    parameters = signature.parameters.values()
    if "completions" not in signature.parameters:
        try:
            signature.bind("", {}, ids=[])
        except TypeError as error:
            raise TreepackError(
                f"{name_of_code(function)}: takes {signature}; write score(text, fields, *, ids), or TRL's "
                "score(completions, **kwargs)"
            ) from error
        return function
    takes_all = any(each.kind == each.VAR_KEYWORD for each in parameters)

    async def score(text: str | None, fields: dict[str, Any], *, ids: list[int]) -> Any:
        messages = fields.get("messages", fields.get("prompt"))
        is_chat = isinstance(messages, list)
        given = {name: [value] for name, value in fields.items()} | {
            "prompts": [messages],
            "completions": [[{"role": "assistant", "content": text}] if is_chat else text],
            "completion_ids": [ids],
        }
        chosen = {name: value for name, value in given.items() if takes_all or name in signature.parameters}
        result = await call(function, where="a reward in TRL's shape", **chosen)
        if not isinstance(result, Sequence | np.ndarray) or len(result) != 1:
            raise TreepackError(f"{name_of_code(function)} returned {result!r}; expected a list with one reward")
        return result[0]

    return functools.update_wrapper(score, function)


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
