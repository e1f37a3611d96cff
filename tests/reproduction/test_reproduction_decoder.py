"""The fast decoder of the reproduction against transformers' own forward pass, alone and in batches."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from decode import DecodeEngine, Graphs, Request
from hypothesis import given, settings
from hypothesis import strategies as st
from policy import make_policy
from quantiles import quantile_tokens, uniform_numbers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM
from words import WORDS

from treepack.rollout.engine import LENGTH, STOP, EngineError, Sampling, Segment, check_segments
from treepack.trajectory import Int32

STOPS = tuple(range(100, 110))  # ten of 131 tokens, so that many continuations end early
POLICY = make_policy("test", seed=3)
# Larger logits, so that the probabilities differ.
with torch.no_grad():
    POLICY.model.embed_tokens.weight *= 40


def engine(model: Any = POLICY, temperature: float = 1.0, rows: int = 16) -> DecodeEngine:
    return DecodeEngine(model, Sampling(temperature=temperature, stop_token_ids=STOPS), rows=rows, longest=48)


def forward_logprobs(model: Any, ids: Int32, num: int, temperature: float = 1.0) -> torch.Tensor:
    """Return log-probabilities [num, V] of the last `num` tokens' places by transformers' forward pass."""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
    scores: torch.Tensor = logits[-num - 1 : -1].float() / temperature
    return scores.log_softmax(-1)


def check_against_forward(model: Any, request: Request, segments: list[Segment], temperature: float = 1.0) -> None:
    """Compare log-probabilities, the choice of each token, and the end with those of the model itself."""
    check_segments(segments, count=request.count, max_tokens=request.max_tokens)
    for number, segment in enumerate(segments):
        logprobs = forward_logprobs(
            model, np.concatenate([request.ids, segment.tokens]), len(segment.tokens), temperature
        )
        tokens = torch.from_numpy(segment.tokens.astype(np.int64))
        assert segment.logprobs is not None
        assert segment.logprobs.dtype == np.float32
        expected = logprobs.gather(1, tokens[:, None]).squeeze(1)
        torch.testing.assert_close(torch.from_numpy(segment.logprobs), expected, rtol=0, atol=1e-5)
        pair = np.array([request.seed], np.uint64), np.array([number], np.uint64)
        uniform = torch.from_numpy(uniform_numbers(*pair, len(tokens))[0])
        assert quantile_tokens(logprobs, uniform).tolist() == tokens.tolist()
        is_stop = np.isin(segment.tokens, STOPS)
        assert not is_stop[:-1].any()
        assert segment.finish == (STOP if is_stop[-1] else LENGTH)


REQUESTS = st.lists(
    st.builds(
        lambda ids, count, size, seed: Request(np.array(ids, np.int32), count, size, seed),
        st.lists(st.integers(0, len(WORDS) - 1), min_size=1, max_size=12),
        st.integers(1, 4),
        st.integers(1, 20),
        st.integers(0, 2**62 - 1),
    ),
    min_size=1,
    max_size=12,
)


@given(REQUESTS, st.sampled_from([0.5, 1.0, 2.0]))
@settings(max_examples=8)
def test_every_continuation_is_that_of_the_models_own_forward_pass(requests: list[Request], temperature: float) -> None:
    sampler = engine(temperature=temperature)
    for request, segments in zip(requests, sampler.decode(requests), strict=True):
        check_against_forward(POLICY, request, segments, temperature)


@given(REQUESTS)
@settings(max_examples=8)
def test_a_continuation_is_the_same_alone_and_in_a_batch(requests: list[Request]) -> None:
    together, alone = engine(), engine()
    for request, segments in zip(requests, together.decode(requests), strict=True):
        (expected,) = alone.decode([request])
        assert [each.tokens.tolist() for each in segments] == [each.tokens.tolist() for each in expected]
        assert [each.finish for each in segments] == [each.finish for each in expected]


class Rehearsed(Graphs):
    """Graphs for a CPU: all that happens around CUDA's own part, with steps that run at once."""

    def rehearse(self, step: Callable[[], None]) -> None:
        step()

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        return step


@given(REQUESTS)
@settings(max_examples=6)
def test_rows_in_buckets_and_rehearsals_before_graphs_change_nothing(requests: list[Request]) -> None:
    sampler, plain = engine(rows=64), engine()
    sampler.graphs = Rehearsed()
    for segments, expected in zip(sampler.decode(requests), plain.decode(requests), strict=True):
        for one, other in zip(segments, expected, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.logprobs is not None
            assert other.logprobs is not None
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-5)
    assert all(size in (32, 64) and width in (64,) for size, width in sampler.graphs.graphs)


def test_graphs_of_weights_that_moved_in_memory_are_dropped() -> None:
    model = make_policy("test", seed=4)
    sampler = engine(model)
    sampler.graphs = Rehearsed()
    request = Request(np.array([5, 6], np.int32), 2, 10, 1)
    sampler.decode([request])
    before = dict(sampler.graphs.graphs)
    sampler.decode([request])
    assert sampler.graphs.graphs == before
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    sampler.decode([request])
    assert all(sampler.graphs.graphs[key] is not before[key] for key in before)


def test_a_capture_that_fails_is_said_once_and_the_steps_run_without_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    class Failing(Rehearsed):
        def capture(self, step: Callable[[], None]) -> Callable[[], None]:
            if len(self.graphs) > 0:
                raise RuntimeError("operation not permitted when stream is capturing")
            return step

    sampler = engine(rows=64)
    sampler.graphs = Failing()
    for number in (20, 40):
        request = Request(np.arange(8, dtype=np.int32), number, 20, 1)
        check_against_forward(POLICY, request, sampler.decode([request])[0])
    assert capsys.readouterr().err.count("runs without CUDA graphs (operation not permitted") == 1
    assert sampler.graphs.graphs == {}


class Devices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the devices of all tensors that operators receive and return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen += [each.device.type for each in tree_leaves((args, kwargs, out)) if isinstance(each, torch.Tensor)]
        return out


def test_a_step_reads_and_writes_tensors_of_the_models_device_only() -> None:
    # A graph cannot contain a copy from the CPU, such as that of a number which torch.where makes a tensor of.
    sampler = engine(make_policy("test", seed=0).to("meta"))
    sampler.graphs = Rehearsed()
    with Devices() as devices, torch.no_grad():
        sampler.step(16, 64)
    assert len(devices.seen) > 500
    assert set(devices.seen) == {"meta"}


def test_a_model_of_llamas_shape_is_decoded_too() -> None:
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).float().eval()
    requests = [Request(np.arange(size, dtype=np.int32), 2, 12, size) for size in (1, 4, 9)]
    for request, segments in zip(requests, engine(model).decode(requests), strict=True):
        check_against_forward(model, request, segments)


def test_a_batch_samples_from_the_weights_as_they_are_at_the_moment() -> None:
    model = make_policy("test", seed=4)
    sampler = engine(model)
    request = Request(np.array([5, 6], np.int32), 2, 10, 1)
    for version in ("0", "1"):
        asyncio.run(sampler.publish(version))
        (segments,) = sampler.decode([request])
        check_against_forward(model, request, segments)
        assert {segment.version for segment in segments} == {version}
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))


def test_calls_that_wait_together_are_one_batch_and_count_their_tokens() -> None:
    sampler = engine(rows=64)
    prompts = [np.array(ids, np.int32) for ids in ([1, 2, 3], [1, 2, 3], [1, 2, 4], [9])]

    async def ask() -> list[list[Segment]]:
        calls = (sampler.extend(ids, count=3, max_tokens=5, seed=seed) for seed, ids in enumerate(prompts))
        return await asyncio.gather(*calls)

    answers = asyncio.run(ask())
    assert sampler.counts.batches == 1
    assert sampler.counts.decoded == sum(len(segment.tokens) for answer in answers for segment in answer)
    # Twelve rows compute their last tokens, and [1, 2] is computed once for the nine rows that share it.
    assert sampler.counts.prefilled == 12 + 2
    for seed, (ids, answer) in enumerate(zip(prompts, answers, strict=True)):
        check_against_forward(POLICY, Request(ids, 3, 5, seed), answer)


def test_a_cancelled_call_leaves_the_others_of_its_batch_as_they_are() -> None:
    sampler = engine()

    async def ask() -> list[Segment]:
        calls = [
            asyncio.ensure_future(sampler.extend(np.array([seed], np.int32), count=1, max_tokens=4, seed=seed))
            for seed in range(3)
        ]
        await asyncio.sleep(0)
        calls[1].cancel()
        return [(await calls[number])[0] for number in (0, 2)]

    for seed, segment in zip((0, 2), asyncio.run(ask()), strict=True):
        check_against_forward(POLICY, Request(np.array([seed], np.int32), 1, 4, seed), [segment])
    assert sampler.counts.batches == 1


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda: engine().decode([Request(np.zeros(0, np.int32), 1, 1, 0)]), "a prompt has no tokens"),
        (lambda: engine().decode([Request(np.zeros(40, np.int32), 1, 9, 0)]), "40 tokens and 9 more exceed the 48"),
        (lambda: DecodeEngine(POLICY, Sampling(top_k=5), rows=2), "leave out top_p and top_k"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused(work: Callable[[], object], message: str) -> None:
    with pytest.raises(Exception, match=message) as caught:
        work()
    assert type(caught.value) is EngineError or message.startswith("leave out")


def test_numbers_of_a_request_depend_on_its_seed_and_number_alone_and_are_uniform() -> None:
    seeds = np.repeat(np.arange(40, dtype=np.uint64) << np.uint64(50), 25)
    numbers = np.tile(np.arange(25, dtype=np.uint64), 40)
    values = uniform_numbers(seeds, numbers, 100)
    chosen = [900, 3]
    assert (uniform_numbers(seeds[chosen], numbers[chosen], 7) == values[chosen, :7]).all()
    assert values.min() >= 0
    assert values.max() < 1
    assert len(np.unique(values)) == values.size
    # Mean 1/2 and, over neighbours in each direction, no correlation: five standard errors of 100,000 numbers.
    centred = values - 0.5
    assert abs(centred.mean()) < 5 * (1 / 12) ** 0.5 / values.size**0.5
    for product in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
        assert abs(product.mean()) < 5 / 12 / product.size**0.5
    counts = np.histogram(values, 64, (0, 1))[0]
    assert ((counts - values.size / 64) ** 2).sum() / (values.size / 64) < 63 + 5 * 126**0.5


def test_samples_of_one_prompt_have_the_probabilities_of_the_model() -> None:
    sampler = engine(rows=512)
    ids = np.array([7, 8, 9], np.int32)
    (segments,) = sampler.decode([Request(ids, 4096, 1, 11)])
    counts = np.bincount([int(segment.tokens[0]) for segment in segments], minlength=len(WORDS))
    probabilities = forward_logprobs(POLICY, np.append(ids, 0).astype(np.int32), 1)[0].exp().numpy()
    errors = np.abs(counts / 4096 - probabilities) / np.sqrt(probabilities * (1 - probabilities) / 4096 + 1e-9)
    assert errors.max() < 5
