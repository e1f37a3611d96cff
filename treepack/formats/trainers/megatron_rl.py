"""Rollouts of Megatron-RL as token ids, alone or in groups: one list per turn, with the whole prompt in it.

    {"rollouts": [rollout, ..], "batch_id": 0, "uid": null}
    {"trajectory": [[1, 2, 3], [1, 2, 3, 4, 5]], "generation_mask": [[F, F, T], [F, F, F, F, T]],
     "logprobs": [[-0.5], [-0.25]], "reward": 1.0, "env_id": "..", "problem_id": ".."}

A turn has one log-probability for each generated token, in order; the one of an end-of-document token may be missing.
Or it has one log-probability fewer than tokens, and then the one at position p belongs to token p + 1. Earlier
versions have one turn only, in flat lists.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from treepack.formats.kit import (
    Format,
    Outcomes,
    ReadOptions,
    Record,
    Skipped,
    TokenCall,
    TreepackError,
    mask_values,
    objects_at,
    read_calls,
    shown,
    with_notes,
    without,
)
from treepack.ingest.readers.fields.token_fields import number_values
from treepack.trajectory import Float64

LAST_NOTE = "the last token has no log-probability and is not trained"
# Bookkeeping of the sampler, and fields that become calls.
_DROPPED = frozenset(
    """
    policy_epoch kv_cache_epoch num_evictions trajectory generation_mask logprobs advantage_override
    """.split()
)
# Fields of the group that its rollouts do not inherit.
_GROUP = frozenset({"rollouts", "batch_id", "index_in_batch", "uid"})


def _read_megatron_rl(record: Record, options: ReadOptions) -> Outcomes:
    """Read the trajectories of a group, `<record>/<index>`, or of a single rollout.

    Raises:
        TreepackError: turns, masks and log-probabilities that contradict each other.
    """
    value, source = record.value, record.source
    if "rollouts" not in value:
        yield from _read_rollout(record, options)
        return
    rest = without(value, _GROUP)
    for index, member in enumerate(objects_at(value, "rollouts", source)):
        named = {"trajectory_id": f"{record.label}/{index}", "group_id": value.get("uid") or source}
        yield from _read_rollout(replace(record, value=rest | member | named), options)


def _read_rollout(record: Record, options: ReadOptions) -> Outcomes:
    value, source = record.value, record.source
    turns = _by_turn(value["trajectory"], "trajectory", source)
    if any(isinstance(turn, str) for turn in turns):
        yield Skipped(source, "text without the length of its prompt")
        return
    masks = value.get("generation_mask")
    if masks is None:
        yield Skipped(source, "no mask of generated tokens")
        return
    masks = _by_turn(masks, "generation_mask", source)
    logprobs = value.get("logprobs")
    logprobs = [None] * len(turns) if logprobs is None else _by_turn(logprobs, "logprobs", source)
    if not len(turns) == len(masks) == len(logprobs):
        raise TreepackError(
            f"{source}: has {len(turns)} turns, {len(masks)} masks and {len(logprobs)} lists of log-probabilities; "
            "expected one each per turn"
        )
    calls: list[TokenCall] = []
    notes: tuple[str, ...] = ()
    for number, (turn, mask, values) in enumerate(zip(turns, masks, logprobs, strict=True), 1):
        call, call_notes = _call(turn, mask, values, f"{source}: turn {number}")
        calls.append(replace(call, values=call.values | {"advantages": value.get("advantage_override")}))
        notes = notes or call_notes
    rest = without(value, _DROPPED)
    if rest.get("group_id") is None:
        # The rollouts of a problem form a group, even if they are in different records.
        rest["group_id"] = rest.pop("problem_id", None)
    yield from with_notes(read_calls(replace(record, value=rest), calls, options), notes)


def _by_turn(value: Any, name: str, source: str) -> list[Any]:
    """Return one list per turn; a flat list belongs to the only turn."""
    if not isinstance(value, list):
        raise TreepackError(f"{source}: {name} is {shown(value)}; expected one list per turn")
    # [[1, 2], [1, 2, 3]] -> 2 turns, [1, 2, 3] -> 1 turn
    nested = all(isinstance(each, list | np.ndarray | str) for each in value)
    return value if nested else [value]


def _call(turn: Any, mask: Any, logprobs: Any, where: str) -> tuple[TokenCall, tuple[str, ...]]:
    """Return the call of one turn, whose prompt ends before the first generated token, and the notes on it."""
    if not isinstance(turn, list | np.ndarray) or not isinstance(mask, list | np.ndarray):
        raise TreepackError(f"{where} is {shown(turn)} with the mask {shown(mask)}; expected a list of each")
    flags = mask_values(mask, source=where, name="generation_mask").astype(np.uint8)
    if len(flags) != len(turn):
        raise TreepackError(f"{where} has {len(turn)} tokens and {len(flags)} values of generation_mask; drop one")
    # flags [0, 0, 1, 0, 1] -> generated [2, 4], and the prompt are the first 2 tokens
    generated = np.flatnonzero(flags)
    start = int(generated[0]) if len(generated) else len(turn)
    if logprobs is None:
        return TokenCall(turn[:start], turn[start:], {"loss_mask": flags[start:]}), ()
    numbers = number_values(logprobs, source=where, name="logprobs")
    whole: Float64 = np.full(len(turn), np.nan)
    notes: tuple[str, ...] = ()
    fits = [len(generated), len(turn) - 1]
    if len(numbers) == len(generated):
        whole[generated] = numbers
    elif len(numbers) == len(turn) - 1:
        # One per predicted token: the first token of a sequence is never predicted.
        whole[1:] = numbers
    elif len(numbers) == len(generated) - 1:
        # The log-probability of the last generated token, an end of document, is missing.
        whole[generated[:-1]] = numbers
        flags[generated[-1]] = 0
        notes = (LAST_NOTE,)
    else:
        raise TreepackError(
            f"{where} has {len(numbers)} log-probabilities; "
            f"expected {fits[0]} (its generated tokens) or {fits[1]} (all of its tokens but the first)"
        )
    values = {"loss_mask": flags[start:], "rollout_log_probs": whole[start:]}
    return TokenCall(turn[:start], turn[start:], values), notes


FORMAT = Format(
    name="megatron-rl",
    rank=450,
    program="Megatron-LM (megatron.rl: TokenRollout, RolloutGroup)",
    recognised_by="`trajectory` beside `generation_mask` or `policy_epoch`, or `rollouts` that have them",
    requires="""
        rollouts:filled(trajectory:list, generation_mask|policy_epoch);
        rollouts:!filled_list, trajectory:list, generation_mask|policy_epoch
    """,
    used="""
        rollouts.trajectory rollouts.generation_mask rollouts.logprobs rollouts.reward rollouts.env_id
        rollouts.problem_id rollouts.advantage_override uid
    """,
    dropped="""
        policy_epoch, kv_cache_epoch and num_evictions;
        batch_id and index_in_batch;
        rollouts of text (the length of the prompt is not in the record);
        a bank's binary files
    """,
    keeps="token ids, masks, log-probabilities, rewards, lineage",
    read=_read_megatron_rl,
)
