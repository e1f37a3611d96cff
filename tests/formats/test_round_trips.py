"""Round trips of token ids: records as each program writes them give the rollouts that they were made of.

    ROLLOUTS    one rollout in one record, with padding before and after it
    BATCHES     several rollouts in one record
    CALLS       the calls of one conversation, each with its whole prompt or with the tokens that it adds

What else a format has is in the test file of its program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.readings import only, read_as, trajectories
from support.token_rollouts import Conversation, Rollout, back, conversations, expected, found, rollouts

Record = dict[str, Any]
ANSWER = {"role": "assistant", "content": "4"}
PADDING = st.integers(0, 3)


def whole(rollout: Rollout, values: list[Any], fill: Any = 0.0) -> list[Any]:
    """Values of the response over all tokens."""
    return [fill] * len(rollout.prompt) + values


def scaled(rollout: Rollout, factor: float) -> list[float]:
    return [factor * each for each in rollout.logprobs]


def advantages(rollout: Rollout) -> list[float]:
    return whole(rollout, [0.5 * flag for flag in rollout.mask])


def flags(rollout: Rollout) -> list[bool]:
    return whole(rollout, [bool(flag) for flag in rollout.mask], False)


@dataclass(frozen=True)
class Written:
    """Write a record of a format from rollouts; it keeps numbers, and its trajectories have these facts."""

    format: str
    write: Callable[..., Record]
    kept: str
    facts: Record = field(default_factory=dict)


def verl_loop(rollout: Rollout, left: int, right: int) -> Record:
    return {
        "prompt_ids": rollout.prompt,
        "response_ids": rollout.response,
        "response_mask": rollout.mask,
        "response_logprobs": rollout.logprobs,
        "reward_score": rollout.reward,
        "extra_fields": {"min_global_steps": 3, "turn_scores": []},
    }


def verl_row(rollout: Rollout, left: int, right: int) -> Record:
    num, after = len(rollout.ids), [0.0] * right
    scores = [0.0] * (len(rollout.response) - 1) + [rollout.reward]
    return {
        "prompts": [7] * left + rollout.prompt,
        "responses": rollout.response + [7] * right,
        "input_ids": [7] * left + rollout.ids + [7] * right,
        "attention_mask": [0] * left + [1] * num + [0] * right,
        "position_ids": [0] * left + list(range(num)) + [num - 1] * right,
        "response_mask": rollout.mask + [0] * right,
        "rollout_log_probs": rollout.logprobs + after,
        "old_log_probs": scaled(rollout, 2) + after,
        "ref_log_prob": scaled(rollout, 4) + after,
        "token_level_scores": scores + after,
        "token_level_rewards": [each - 0.01 for each in scores] + after,
        "advantages": [0.5] * len(rollout.response) + after,
        "returns": [9.0] * len(rollout.response) + after,
        "uid": "g",
        "__num_turns__": 4,
    }


def prime_rl(rollout: Rollout, left: int, right: int) -> Record:
    return {
        "token_ids": rollout.ids,
        "temperatures": [1.0] * len(rollout.ids),
        "mask": flags(rollout),
        "logprobs": whole(rollout, rollout.logprobs),
        "advantages": advantages(rollout),
        "env_name": "e",
    }


def slime(rollout: Rollout, left: int, right: int) -> Record:
    return {
        "group_index": 4,
        "index": 9,
        "status": "completed",
        "tokens": rollout.ids,
        "response_length": len(rollout.response),
        "loss_mask": rollout.mask,
        "rollout_log_probs": rollout.logprobs,
        "reward": rollout.reward,
    }


def trl_batch(rollout: Rollout, left: int, right: int) -> Record:
    return {
        "prompt_ids": [0] * left + rollout.prompt,
        "prompt_mask": [0] * left + [1] * len(rollout.prompt),
        "completion_ids": rollout.response + [0] * right,
        "completion_mask": [1] * len(rollout.response) + [0] * right,
        "tool_mask": rollout.mask + [1] * right,
        "sampling_per_token_logps": rollout.logprobs + [0.0] * right,
        "old_per_token_logps": scaled(rollout, 2) + [-9.0] * right,
        "advantages": -0.5,
    }


def trl_sample(rollout: Rollout, left: int, right: int) -> Record:
    return {
        "input_ids": rollout.ids,
        "completion_mask": whole(rollout, rollout.mask, 0),
        "old_log_probs": whole(rollout, rollout.logprobs),
        "advantage": 0.5,
        "group_id": 3,
        "model_version": 7,
    }


def tinker_datum(rollout: Rollout, left: int, right: int) -> Record:
    # The targets are the tokens one place later, and so are all numbers.
    inputs = {
        "target_tokens": {"data": rollout.ids[1:], "dtype": "int64", "shape": [len(rollout.ids) - 1]},
        "logprobs": {"data": whole(rollout, rollout.logprobs)[1:], "dtype": "float32"},
        "advantages": {"data": advantages(rollout)[1:], "dtype": "float32"},
        "mask": whole(rollout, [float(flag) for flag in rollout.mask])[1:],
    }
    return {"model_input": {"chunks": [{"tokens": rollout.ids[:-1], "type": "encoded_text"}]}, "loss_fn_inputs": inputs}


def megatron_rl(rollout: Rollout, left: int, right: int) -> Record:
    # One log-probability for each generated token, or one for each token but the first.
    logprobs = whole(rollout, rollout.logprobs)[1:] if left else rollout.at_trained(rollout.logprobs)
    return {
        "trajectory": [rollout.ids],
        "generation_mask": [flags(rollout)],
        "logprobs": [logprobs],
        "reward": rollout.reward,
        "env_id": "e",
        "problem_id": "q",
    }


ROLLOUTS = {
    "verl, an agent loop": Written(
        "verl", verl_loop, "logprobs reward", {"metadata": {"min_global_steps": 3}, "notes": ()}
    ),
    "verl, a row": Written(
        "verl", verl_row, "logprobs reward old ref advantages", {"group_id": "g", "metadata": {"num_turns": 4}}
    ),
    "prime-rl": Written("prime-rl", prime_rl, "logprobs advantages", {"metadata": {"env_name": "e"}, "notes": ()}),
    "slime": Written("slime", slime, "logprobs reward", {"trajectory_id": "9", "group_id": "4", "notes": ()}),
    "TRL, a row": Written("trl-grpo", trl_batch, "logprobs old", {"advantage": -0.5}),
    "TRL, a sample": Written(
        "trl-grpo",
        trl_sample,
        "logprobs old same",
        {"group_id": "3", "advantage": 0.5, "metadata": {"model_version": 7}},
    ),
    "Tinker, a datum": Written("tinker-datum", tinker_datum, "logprobs advantages"),
    "Megatron-RL": Written(
        "megatron-rl", megatron_rl, "logprobs reward", {"group_id": "q", "metadata": {"env_id": "e"}}
    ),
}


@pytest.mark.parametrize("written", ROLLOUTS.values(), ids=ROLLOUTS)
@given(rollout=rollouts(), left=PADDING, right=PADDING)
def test_a_rollout_comes_back(written: Written, rollout: Rollout, left: int, right: int) -> None:
    item = only(read_as(written.format, written.write(rollout, left, right)))
    assert found(item) == expected(rollout, written.kept)
    assert {name: getattr(item, name) for name in written.facts} == written.facts


def skyrl_generator(batch: list[Rollout], padding: int) -> Record:
    return {
        "prompt_token_ids": [each.prompt for each in batch],
        "response_ids": [each.response for each in batch],
        "rewards": [each.reward for each in batch],
        "loss_masks": [each.mask for each in batch],
        "rollout_logprobs": [each.logprobs for each in batch],
        "trajectory_ids": [{"instance_id": "q", "repetition_id": number} for number in range(1, len(batch) + 1)],
        "rollout_metrics": {"a": 1.0},
    }


def skyrl_batch(batch: list[Rollout], padding: int) -> Record:
    num = max(len(each.ids) for each in batch)
    # The window of the responses may reach into the prompts and into the padding of shorter rows.
    window = max(len(each.response) for each in batch)

    def padded(values: list[Any], size: int = window) -> list[Any]:
        return [0] * (size - len(values)) + values

    return {
        "sequences": [padded(each.ids, num) for each in batch],
        "attention_mask": [padded([1] * len(each.ids), num) for each in batch],
        "loss_mask": [padded([float(flag) for flag in each.mask]) for each in batch],
        "response_mask": [padded([1] * len(each.response)) for each in batch],
        "rollout_logprobs": [padded(each.logprobs) for each in batch],
        "action_log_probs": [padded(scaled(each, 2)) for each in batch],
        "advantages": [[0.5] * window for _ in batch],
        "rewards": [padded([0.0] * (len(each.response) - 1) + [each.reward]) for each in batch],
        "returns": [[9.0] * window for _ in batch],
        "values": None,
    }


def prime_rl_batch(batch: list[Rollout], padding: int) -> Record:
    def joined(values: Callable[[Rollout], list[Any]], fill: Any) -> list[Any]:
        return [value for each in batch for value in values(each)] + [fill] * padding

    lengths = [len(each.ids) for each in batch]
    lengths[-1] += padding
    return {
        "input_ids": joined(lambda each: each.ids, 1),
        "loss_mask": joined(flags, False),
        "inference_logprobs": joined(lambda each: whole(each, each.logprobs), 0.0),
        "advantages": joined(advantages, 0.0),
        "position_ids": [index for each in batch for index in range(len(each.ids))] + list(range(padding)),
        "sequence_lengths": lengths,
        "seq_lens": lengths,
        "env_names": joined(lambda each: ["e"] * len(each.ids), ""),
    }


def prime_rl_sft(batch: list[Rollout], padding: int) -> Record:
    lengths = [len(each.ids) - 1 for each in batch]
    positions = [index for length in lengths for index in range(length)] + list(range(padding))
    lengths[-1] += padding
    return {
        "input_ids": [token for each in batch for token in each.ids[:-1]] + [0] * padding,
        "target_ids": [token for each in batch for token in each.ids[1:]] + [0] * padding,
        "loss_mask": [flag for each in batch for flag in flags(each)[1:]] + [False] * padding,
        "position_ids": positions,
        "seq_lens": lengths,
        "mm_kwargs": None,
    }


def trl_packed(name: str) -> Callable[..., Record]:
    def write(batch: list[Rollout], padding: int) -> Record:
        ids = [token for each in batch for token in each.ids]
        marks = [flag for each in batch for flag in whole(each, each.mask, 0)]
        labels = [token if flag else -100 for token, flag in zip(ids, marks, strict=True)]
        lengths = [len(each.ids) for each in batch]
        return {"input_ids": ids, "seq_lengths": lengths, name: labels if name == "labels" else marks}

    return write


OF_SEQUENCES = {"trajectory_id": "r.jsonl:1/sequence-{}"}
BATCHES = {
    "SkyRL, a generator": Written(
        "skyrl", skyrl_generator, "logprobs reward", {"trajectory_id": "q/{}", "group_id": "q"}
    ),
    "SkyRL, a batch": Written("skyrl", skyrl_batch, "logprobs reward old advantages"),
    "prime-rl, a micro batch": Written(
        "prime-rl", prime_rl_batch, "logprobs advantages", OF_SEQUENCES | {"metadata": {"env_name": "e"}}
    ),
    "prime-rl, a supervised batch": Written("prime-rl-sft", prime_rl_sft, "", OF_SEQUENCES),
    **{
        f"TRL, packed with {name}": Written("trl-packed", trl_packed(name), "", OF_SEQUENCES)
        for name in ("labels", "completion_mask", "assistant_masks")
    },
}


@pytest.mark.parametrize("written", BATCHES.values(), ids=BATCHES)
@given(batch=st.lists(rollouts(), min_size=1, max_size=3), padding=PADDING)
def test_the_rollouts_of_a_batch_come_back(written: Written, batch: list[Rollout], padding: int) -> None:
    items = trajectories(read_as(written.format, written.write(batch, padding)))
    assert [found(item) for item in items] == [expected(rollout, written.kept) for rollout in batch]
    for number, item in enumerate(items, 1):
        for name, fact in written.facts.items():
            assert getattr(item, name) == (fact.format(number) if isinstance(fact, str) else fact)


def rllm(talk: Conversation) -> list[Record]:
    steps = [{"prompt_ids": prompt, "response_ids": said, "logprobs": values} for prompt, said, values in talk.calls]
    return [{"id": "q:3", "is_correct": True, "trajectories": [{"steps": steps, "reward": 0.5}]}]


def gateway(talk: Conversation) -> list[Record]:
    chain: list[Record] = []
    for number, (delta, (_, said, values)) in enumerate(zip(talk.deltas, talk.calls, strict=True)):
        trace = {"trace_id": str(number), "session_id": "s", "completion_token_ids": said, "logprobs": values}
        link = {"prompt_delta_token_ids": delta, "parent_trace_id": str(number - 1)}
        chain.append(trace | (link if number else {"prompt_token_ids": delta, "metadata": {"reward": 0.5}}))
    return chain


def art(talk: Conversation) -> list[Record]:
    choices: list[Record] = []
    for prompt, said, values in talk.calls:
        content = [{"token": f"token_id:{token}", "logprob": value} for token, value in zip(said, values, strict=True)]
        choice = {"message": ANSWER, "prompt_token_ids": prompt, "token_ids": said, "logprobs": {"content": content}}
        choices += [{"role": "user", "content": "2+2?"}, choice]
    return [{"messages_and_choices": choices, "reward": 0.5}]


def tinker(talk: Conversation) -> list[Record]:
    def model_input(*parts: list[int]) -> Record:
        return {"chunks": [{"tokens": part, "type": "encoded_text"} for part in parts]}

    steps: list[Record] = [
        {"ob": model_input(prompt[:1], prompt[1:]), "ac": {"tokens": said, "maybe_logprobs": values}, "reward": 0.0}
        for prompt, said, values in talk.calls
    ]
    for number in (0, -1):  # the rewards of transitions are summed
        steps[number]["reward"] += 0.25
    return [{"transitions": steps, "final_ob": model_input()}]


def megatron_turns(talk: Conversation) -> list[Record]:
    return [
        {
            "trajectory": [prompt + said for prompt, said, _ in talk.calls],
            "generation_mask": [[False] * len(prompt) + [True] * len(said) for prompt, said, _ in talk.calls],
            "logprobs": talk.logprobs,
            "reward": [0.25, 0.25],
        }
    ]


def verifiers(talk: Conversation) -> list[Record]:
    nodes: list[Record] = []
    for delta, (_, said, values) in zip(talk.deltas, talk.calls, strict=True):
        for ids, role, more in ((delta, "user", {}), (said, "assistant", {"logprobs": values})):
            is_sampled = role == "assistant"
            root = {"parent": len(nodes) - 1} if nodes else {}
            message = {"role": role, "content": "".join(map(str, ids))}
            mask = [is_sampled] * len(ids)
            nodes.append({**root, "message": message, "sampled": is_sampled, "token_ids": ids, "mask": mask, **more})
    trace = {"id": "t", "agent": {"name": "agent"}, "rewards": {"a": {"score": 0.5, "weight": 1.0}}, "nodes": nodes}
    return [{"id": "e", "env": {"id": "v"}, "task": {"key": "k"}, "traces": [trace]}]


def verifiers_results(talk: Conversation) -> list[Record]:
    steps = [
        {"tokens": {"prompt_ids": prompt, "completion_ids": said, "completion_logprobs": values}, "trajectory_id": "t"}
        for prompt, said, values in talk.calls
    ]
    return [{"example_id": 3, "completion": None, "reward": 0.5, "trajectory": steps}]


CALLS: dict[str, tuple[Callable[[Conversation], list[Record]], Record]] = {
    "rllm": (rllm, {"trajectory_id": "q:3", "group_id": "q"}),
    "rllm-gateway": (gateway, {"trajectory_id": "s"}),
    "art": (art, {}),
    "tinker": (tinker, {}),
    "megatron-rl": (megatron_turns, {}),
    "verifiers": (verifiers, {"trajectory_id": "t", "group_id": "k"}),
    "verifiers-results": (verifiers_results, {"trajectory_id": "t", "group_id": "3"}),
}


@pytest.mark.parametrize("name", CALLS)
@given(talk=conversations())
def test_the_calls_of_a_conversation_come_back(name: str, talk: Conversation) -> None:
    write, facts = CALLS[name]
    item = only(read_as(name, *write(talk)))
    assert back(item) == talk.expected(0.5)
    assert {fact: getattr(item, fact) for fact in facts} == facts
