"""Made-up rollouts as token ids, for round trips through the formats of trainers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from treepack.trajectory import Tokens, Trajectory, positions

FLOATS = st.floats(-20, 0, width=32)


@dataclass(frozen=True)
class Rollout:
    """A prompt and a response; `mask` and `logprobs` have one value per token of the response, 0.0 off the mask."""

    prompt: list[int]
    response: list[int]
    mask: list[int]
    logprobs: list[float]
    reward: float

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.response

    @property
    def trained(self) -> list[int]:
        """Positions of the trained tokens among `ids`."""
        return [len(self.prompt) + i for i, flag in enumerate(self.mask) if flag]

    def at_trained(self, values: list[float]) -> list[float]:
        return [value for value, flag in zip(values, self.mask, strict=True) if flag]


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    """Rollouts whose prompt is not empty and of whose response at least one token is trained."""
    ids = st.integers(0, 2**31 - 1)
    prompt = draw(st.lists(ids, min_size=1, max_size=5))
    response = draw(st.lists(ids, min_size=1, max_size=8))
    mask = [int(flag) for flag in draw(st.lists(st.booleans(), min_size=len(response), max_size=len(response)))]
    mask[draw(st.integers(0, len(mask) - 1))] = 1
    logprobs = [draw(FLOATS) if flag else 0.0 for flag in mask]
    return Rollout(prompt, response, mask, logprobs, draw(st.sampled_from([0.0, 0.5, 1.0])))


@dataclass(frozen=True)
class Conversation:
    """Calls each of whose prompts begins with the whole call before it; `deltas` are the new tokens of each prompt."""

    deltas: list[list[int]]
    responses: list[list[int]]
    logprobs: list[list[float]]

    @property
    def prompts(self) -> list[list[int]]:
        result: list[list[int]] = []
        before: list[int] = []
        for delta, response in zip(self.deltas, self.responses, strict=True):
            result.append(before + delta)
            before = result[-1] + response
        return result

    @property
    def calls(self) -> list[tuple[list[int], list[int], list[float]]]:
        """Prompt, response and log-probabilities of each call."""
        return list(zip(self.prompts, self.responses, self.logprobs, strict=True))

    def expected(self, reward: float | None) -> tuple[list[int], list[int], list[float], float | None]:
        """The result of `back` for the one trajectory of these calls."""
        starts = [len(prompt) for prompt in self.prompts]
        trained = [start + i for start, reply in zip(starts, self.responses, strict=True) for i in range(len(reply))]
        logprobs = [each for values in self.logprobs for each in values]
        return self.prompts[-1] + self.responses[-1], trained, logprobs, reward


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    """One to four calls with prompts and responses of one to four tokens."""
    ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4)
    deltas = draw(st.lists(ids, min_size=1, max_size=4))
    responses = [draw(ids) for _ in deltas]
    return Conversation(deltas, responses, [[draw(FLOATS) for _ in response] for response in responses])


def back(trajectory: Trajectory) -> tuple[list[int], list[int], list[float] | None, float | None]:
    """The ids of `trajectory`, the positions that it trains, the sampler's log-probabilities there, and its reward."""
    content = trajectory.content
    assert isinstance(content, Tokens)
    logprobs = None if content.sampling_logprob is None else list(map(float, content.sampling_logprob.tolist()))
    trained = positions(content.starts, content.ends).tolist()
    return list(map(int, content.tokens.tolist())), list(map(int, trained)), logprobs, trajectory.reward


def found(item: Trajectory) -> dict[str, Any]:
    """The numbers of `item` at its trained tokens; old and reference log-probabilities are multiples of its own."""
    ids, trained, logprobs, reward = back(item)
    content = item.content
    assert isinstance(content, Tokens)
    numbers = {"old": content.old_logprob, "ref": content.ref_logprob, "advantages": content.advantage}
    lists = {name: None if values is None else list(map(float, values.tolist())) for name, values in numbers.items()}
    return {"ids": ids, "trained": trained, "logprobs": logprobs, "reward": reward} | lists


def expected(rollout: Rollout, kept: str) -> dict[str, Any]:
    """The result of `found` for a format that keeps the numbers `kept`; `same` means old ones equal the sampler's."""
    logprobs = rollout.at_trained(rollout.logprobs)
    numbers = {
        "logprobs": logprobs,
        "reward": rollout.reward,
        "old": logprobs if "same" in kept else [2 * each for each in logprobs],
        "ref": [4 * each for each in logprobs],
        "advantages": [0.5] * len(logprobs),
    }
    content = {"ids": rollout.ids, "trained": rollout.trained}
    return content | {name: values if name in kept.split() else None for name, values in numbers.items()}
