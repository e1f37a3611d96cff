"""The simulated engines have the laws that their exact numbers claim."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from support.tree_estimates import LONG, PROMPT, START, SUCCESS, exact_values, log_normal_law, two_speeds
from treepack.rollout.simulated import ContinuationLaw, log_normal_lengths
from treepack.trajectory import Float64, Int32


def rollout(law: ContinuationLaw, rng: np.random.Generator, *, segment: int) -> tuple[Int32, Float64]:
    """One response in segments, without the prompt, and its log-probabilities."""
    ids, logprobs = PROMPT, np.zeros(0)
    while len(ids) == len(PROMPT) or ids[-1] != law.stop:
        tokens, more = law.sample(ids, max_tokens=segment, rng=rng)
        ids, logprobs = np.concatenate([ids, tokens]), np.concatenate([logprobs, more])
    return ids[len(PROMPT) :], logprobs


@pytest.mark.parametrize("token", [START, LONG, SUCCESS])
def test_the_exact_numbers_of_a_markov_law_follow_from_its_transitions_step_by_step(token: int) -> None:
    law = two_speeds()
    mean, success = exact_values(law, longest=2000, first=token)
    assert law.mean_length(token) == pytest.approx(mean, rel=1e-12)
    assert law.probability_of_last(token, SUCCESS) == pytest.approx(success, rel=1e-12)


def test_a_markov_law_samples_its_mean_length_and_last_tokens() -> None:
    law, rng = two_speeds(), np.random.default_rng(0)
    responses = [rollout(law, rng, segment=7)[0] for _ in range(3000)]
    for values, truth in (
        ([len(ids) for ids in responses], law.mean_length(START)),
        ([ids[-2:-1].tolist() == [SUCCESS] for ids in responses], law.probability_of_last(START, SUCCESS)),
    ):
        assert abs(np.mean(values) - truth) < 3 * np.std(values) / np.sqrt(len(values))


def test_log_probabilities_of_a_markov_law_are_those_of_its_transitions() -> None:
    law = two_speeds()
    ids, logprobs = rollout(law, np.random.default_rng(3), segment=2)
    path = [int(PROMPT[-1]), *ids.tolist()]
    assert logprobs.tolist() == [float(np.log(law.transition[a, b])) for a, b in pairwise(path)]


def test_segments_of_a_length_law_add_up_to_its_distribution() -> None:
    law, mean = log_normal_law()
    rng = np.random.default_rng(0)
    lengths = [len(rollout(law, rng, segment=11)[0]) for _ in range(2000)]
    assert abs(np.mean(lengths) - mean) < 3 * np.std(lengths) / np.sqrt(len(lengths))
    probability = log_normal_lengths(mean=40, sigma=0.6, longest=160)
    edges = np.array([0, 11, 15, 19, 23, 28, 34, 41, 50, 65, 90, 159, 161])
    expected = [probability[a:b].sum() * len(lengths) for a, b in pairwise(edges)]
    assert stats.chisquare(np.histogram(lengths, edges)[0], expected).pvalue > 0.001


def test_log_probabilities_of_a_length_law_add_up_to_that_of_the_length_and_the_tokens() -> None:
    law, _ = log_normal_law()
    probability = log_normal_lengths(mean=40, sigma=0.6, longest=160)
    rng = np.random.default_rng(1)
    for _ in range(20):
        ids, logprobs = rollout(law, rng, segment=9)
        expected = np.log(probability[len(ids)]) - (len(ids) - 1) * np.log(law.vocab_size - 1)
        assert logprobs.sum() == pytest.approx(expected, abs=1e-9)


def test_log_normal_lengths_have_their_mean_and_end() -> None:
    probability = log_normal_lengths(mean=40, sigma=0.6, longest=2000)
    assert probability @ np.arange(2001) == pytest.approx(40.5, abs=0.01)  # rounded up to whole tokens
    assert probability.sum() == pytest.approx(1, abs=1e-12)
    assert log_normal_lengths(mean=40, sigma=0.6, longest=20)[-1] > 0.8
