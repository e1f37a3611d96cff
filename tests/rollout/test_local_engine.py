"""The engine in this process: log-probabilities of a forward pass, repeatable answers, shared keys, one-line errors."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from support.paths import SAMPLE_DATA
from support.refusal import refusal
from support.tiny_families import tiny_family
from treepack.errors import TreepackError
from treepack.model.load import build_model, load_model, read_config
from treepack.rollout.engine import LENGTH, STOP, EngineError, Segment, check_segments
from treepack.rollout.in_process.local import LocalEngine, LocalOptions, default_stop_tokens, load_engine
from treepack.rollout.in_process.local_sampling import quantile_tokens
from treepack.rollout.options import Sampling
from treepack.trajectory import Float32, Int32

MODEL = SAMPLE_DATA / "tiny-qwen3.json"
VOCABULARY = 1464
STOPS = tuple(range(40))  # one token in 37 ends a continuation
WARM = Sampling(temperature=0.7, stop_token_ids=STOPS)
SMALL = LocalOptions(cache_tokens=2048)
Result = TypeVar("Result")


def tokens(number: int, *, seed: int = 0) -> Int32:
    """Return random token ids that are no stop tokens."""
    return np.random.default_rng(seed).integers(len(STOPS), VOCABULARY, number).astype(np.int32)


def closing(engine: LocalEngine, use: Callable[[LocalEngine], Awaitable[Result]]) -> Result:
    """Run `use` and close the engine."""

    async def run() -> Result:
        try:
            return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def small_model(**changes: Any) -> Any:
    """Return the sample model with random weights, in float32."""
    config, _ = read_config(MODEL)
    for name, value in changes.items():
        setattr(config, name, value)
    return build_model(str(MODEL), config, torch.float32, 0)


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    engine = load_engine(MODEL, WARM, dtype=torch.float32, options=SMALL)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def plain() -> Any:
    """The same weights under another attention."""
    model = small_model()
    model.set_attn_implementation("eager")
    return model


def forward(model: Any, ids: Int32, start: int, temperature: float) -> Float32:
    """Return the log-probabilities of ids[start:] in one forward pass."""
    whole = torch.from_numpy(ids).long()[None]
    with torch.no_grad():
        logprobs = (model(whole).logits[0].float() / temperature).log_softmax(-1)
    chosen: Float32 = logprobs[start - 1 : -1].gather(1, whole[0, start:, None])[:, 0].numpy()
    return chosen


def largest_error(model: Any, prompt: Int32, segments: list[Segment], temperature: float = 0.7) -> float:
    """Return the largest difference between the segments' log-probabilities and a forward pass."""
    errors = []
    for segment in segments:
        assert segment.logprobs is not None
        expected = forward(model, np.concatenate([prompt, segment.tokens]), len(prompt), temperature)
        errors.append(float(np.abs(expected - segment.logprobs).max()))
    return max(errors)


def together(engine: LocalEngine, prompts: list[Int32], **options: Any) -> list[list[Segment]]:
    """Continue all prompts at the same time."""

    async def run() -> list[list[Segment]]:
        return list(await asyncio.gather(*(engine.extend(prompt, **options) for prompt in prompts)))

    return asyncio.run(run())


def test_logprobs_of_forks_in_one_batch_equal_a_forward_pass(engine: LocalEngine, plain: Any) -> None:
    prompts = [tokens(number, seed=number) for number in (1, 16, 17, 33, 50)]
    for prompt, segments in zip(prompts, together(engine, prompts, count=2, max_tokens=12, seed=3), strict=True):
        check_segments(segments, count=2, max_tokens=12)
        assert largest_error(plain, prompt, segments) < 1e-5


def test_a_continuation_ends_with_its_stop_token_or_at_max_tokens(engine: LocalEngine) -> None:
    (segments,) = together(engine, [tokens(20)], count=12, max_tokens=24, seed=1)
    assert {segment.finish for segment in segments} == {STOP, LENGTH}
    for segment in segments:
        is_stop = np.isin(segment.tokens, STOPS)
        assert not is_stop[:-1].any()
        assert bool(is_stop[-1]) == (segment.finish == STOP)
        assert segment.finish == STOP or len(segment.tokens) == 24


def test_an_answer_depends_on_its_seed_and_not_on_the_other_requests(engine: LocalEngine) -> None:
    prompts = [tokens(number, seed=number) for number in (5, 40, 23)]
    batch = together(engine, prompts, count=2, max_tokens=8, seed=7)
    ((first, second),) = together(engine, prompts[1:2], count=2, max_tokens=8, seed=7)
    assert [list(segment.tokens) for segment in batch[1]] == [list(first.tokens), list(second.tokens)]
    assert list(first.tokens) != list(second.tokens)
    ((other, _),) = together(engine, prompts[1:2], count=2, max_tokens=8, seed=8)
    assert list(other.tokens) != list(first.tokens)


def test_the_next_segment_of_a_path_reuses_the_full_pages_of_its_past(engine: LocalEngine, plain: Any) -> None:
    prompt = tokens(40, seed=11)
    ((segment,),) = together(engine, [prompt], count=1, max_tokens=2, seed=0)
    assert segment.num_cached == 0
    path = np.concatenate([prompt, segment.tokens])
    (forks,) = together(engine, [path], count=3, max_tokens=4, seed=0)
    assert [fork.num_cached for fork in forks] == [32, 32, 32]
    assert largest_error(plain, path, forks) < 1e-5


@pytest.mark.slow
def test_forks_of_a_new_prompt_compute_its_full_pages_once() -> None:
    async def steps(engine: LocalEngine) -> list[int]:
        computed: list[int] = []
        scheduled = engine._choice.prepare_tensor_args

        def recorded(requests_in_batch: list[Any], arg_storage: Any) -> Any:
            computed.append(sum(request.query_length for request in requests_in_batch))
            return scheduled(requests_in_batch, arg_storage)

        engine._choice.prepare_tensor_args = recorded  # type: ignore[method-assign]
        await engine.extend(tokens(40), count=4, max_tokens=2, seed=0)
        return computed

    # 40 tokens; then the first continuation's token, and the 8 tokens after the full pages for each of the others.
    computed = closing(load_engine(MODEL, WARM, dtype=torch.float32, options=SMALL), steps)
    assert computed[:2] == [40, 1 + 3 * 8]


def test_a_cancelled_call_leaves_the_others_right(engine: LocalEngine, plain: Any) -> None:
    async def run() -> list[Segment]:
        lost = asyncio.create_task(engine.extend(tokens(40, seed=5), count=3, max_tokens=400, seed=0))
        kept = asyncio.create_task(engine.extend(tokens(40, seed=6), count=2, max_tokens=12, seed=0))
        await asyncio.sleep(0.05)
        lost.cancel()
        with pytest.raises(asyncio.CancelledError):
            await lost
        return await kept

    segments = asyncio.run(run())
    assert largest_error(plain, tokens(40, seed=6), segments) < 1e-5
    assert not engine._choice.continuations


def test_a_published_model_answers_with_its_new_weights_and_no_old_keys() -> None:
    model = small_model()

    async def run(engine: LocalEngine) -> tuple[list[Segment], list[Segment]]:
        before = await engine.extend(tokens(40), count=1, max_tokens=6, seed=0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        await engine.publish("step-1")
        return before, await engine.extend(tokens(40), count=1, max_tokens=6, seed=0)

    before, after = closing(LocalEngine(model, WARM, options=SMALL, version="step-0"), run)
    assert (before[0].version, after[0].version, after[0].num_cached) == ("step-0", "step-1", 0)
    model.set_attn_implementation("eager")
    assert largest_error(model, tokens(40), after) < 1e-5


@pytest.mark.slow
def test_sampling_leaves_the_model_and_the_random_state_alone() -> None:
    loaded = load_model(MODEL)
    model = loaded.causal.train()
    attention, state = model.config._attn_implementation, torch.get_rng_state()

    async def sample(engine: LocalEngine) -> list[Segment]:
        return await engine.extend(tokens(9), count=1, max_tokens=3, seed=0)

    (segment,) = closing(LocalEngine(model, WARM, options=SMALL), sample)
    assert model.training
    assert model.config._attn_implementation == attention
    assert torch.equal(state, torch.get_rng_state())
    model.set_attn_implementation("eager")
    assert largest_error(model, tokens(9), [segment]) < 1e-5


@pytest.mark.slow
def test_cuts_of_the_distribution_limit_the_tokens_and_renormalise(plain: Any) -> None:
    sampling = Sampling(temperature=0.7, top_k=3, top_p=0.9)

    async def sample(engine: LocalEngine) -> list[Segment]:
        return await engine.extend(tokens(9), count=8, max_tokens=1, seed=0)

    segments = closing(load_engine(MODEL, sampling, dtype=torch.float32, options=SMALL), sample)
    with torch.no_grad():
        logits = plain(torch.from_numpy(tokens(9)).long()[None]).logits[0, -1] / 0.7
    top = logits.topk(3)
    logprobs = dict(zip(top.indices.tolist(), top.values.log_softmax(-1).tolist(), strict=True))
    for segment in segments:
        assert segment.logprobs is not None
        assert segment.logprobs[0] == pytest.approx(logprobs[int(segment.tokens[0])], abs=1e-5)


@pytest.mark.slow
def test_a_full_cache_delays_requests_and_changes_none(plain: Any) -> None:
    prompts = [tokens(40, seed=seed) for seed in range(12)]

    async def sample(engine: LocalEngine) -> list[list[Segment]]:
        calls = (engine.extend(prompt, count=2, max_tokens=30, seed=0) for prompt in prompts)
        return list(await asyncio.gather(*calls))

    # 24 continuations of 70 tokens want 1,680 tokens of the cache.
    options = LocalOptions(cache_tokens=512)
    answers = closing(load_engine(MODEL, WARM, dtype=torch.float32, options=options), sample)
    for prompt, segments in zip(prompts, answers, strict=True):
        check_segments(segments, count=2, max_tokens=30)
        assert largest_error(plain, prompt, segments) < 1e-5


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "complaint"),
    [
        ([5, VOCABULARY], 4, "token id 1464 and the model has 1464 tokens; tokenize the prompts"),
        ([], 4, "a prompt has no tokens"),
        ([5] * 40, 40_000, "exceed the 32768 positions of the model"),
        ([5] * 40, 4000, "exceed the cache of 2048 tokens"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(
    engine: LocalEngine, prompt: list[int], max_tokens: int, complaint: str
) -> None:
    with pytest.raises(EngineError, match=complaint):
        asyncio.run(engine.extend(np.array(prompt, np.int32), count=1, max_tokens=max_tokens, seed=0))


@pytest.mark.slow
def test_a_machine_without_psutil_gets_no_messages_about_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.continuous_batching import offloading_manager, utils

    for module in (offloading_manager, utils):
        monkeypatch.setattr(module, "is_psutil_available", lambda: False)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    logger = logging.getLogger("ContinuousBatchingLogger")
    logger.addHandler(handler)
    try:
        closing(
            LocalEngine(small_model(), WARM, options=SMALL),
            lambda engine: engine.extend(tokens(5), count=1, max_tokens=2, seed=0),
        )
        assert [record.getMessage() for record in records] == []
        logger.error("something else")
        assert len(records) == 1
    finally:
        logger.removeHandler(handler)


def test_stop_tokens_of_another_model_are_refused() -> None:
    assert "stop_token_ids are [9999] and the model has 1464 tokens" in refusal(
        LocalEngine, small_model(), Sampling(stop_token_ids=(9999,)), options=SMALL
    )


def test_closing_fails_the_calls_under_way() -> None:
    async def run() -> None:
        engine = load_engine(MODEL, Sampling(), dtype=torch.float32, options=SMALL)
        call = asyncio.create_task(engine.extend(tokens(9), count=1, max_tokens=1000, seed=0))
        await asyncio.sleep(0.05)
        await engine.close()
        with pytest.raises(EngineError, match="the engine was closed while it answered"):
            await call
        with pytest.raises(EngineError, match="the engine was closed; start another one"):
            await engine.extend(tokens(9), count=1, max_tokens=1, seed=0)

    asyncio.run(run())


def test_stop_tokens_come_from_the_generation_config_and_else_from_the_config(tmp_path: Path) -> None:
    assert default_stop_tokens(MODEL) == (2,)
    (tmp_path / "config.json").write_bytes(MODEL.read_bytes())
    assert default_stop_tokens(tmp_path) == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 4]}))
    assert default_stop_tokens(tmp_path) == (4, 9)


@pytest.mark.slow
def test_bfloat16_logprobs_are_within_a_hundredth_of_a_forward_pass() -> None:
    model = small_model().bfloat16()
    prompts = [tokens(number, seed=number) for number in (1, 16, 40)]

    async def sample(engine: LocalEngine) -> list[list[Segment]]:
        calls = (engine.extend(prompt, count=3, max_tokens=40, seed=0) for prompt in prompts)
        return list(await asyncio.gather(*calls))

    answers = closing(LocalEngine(model, WARM, options=SMALL), sample)
    model.set_attn_implementation("eager")
    for prompt, segments in zip(prompts, answers, strict=True):
        assert largest_error(model, prompt, segments) < 1e-2


def test_windows_and_sinks_count_in_what_is_sampled() -> None:
    windows: dict[str, Any] = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    model, plain = (tiny_family("gpt_oss", **windows).float() for _ in range(2))
    prompt = tokens(21) % 50

    async def sample(engine: LocalEngine) -> list[Segment]:
        return await engine.extend(prompt, count=2, max_tokens=4, seed=0)

    options = LocalOptions(cache_tokens=512)
    segments = closing(LocalEngine(model, Sampling(temperature=0.7), options=options), sample)
    assert largest_error(plain, prompt, segments) < 1e-5
    for layer in plain.model.layers:  # the sinks matter
        layer.self_attn.sinks.data.fill_(-1e4)
    assert largest_error(plain, prompt, segments) > 1e-3


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("gemma2", "caps its scores, .*; sample from a server"),
        ("deepseek_v3", "has keys and values of several widths, .*; sample from a server"),
        ("qwen3_5_text", "has layers with a state or a convolution, .*; sample from a server"),
    ],
)
def test_attention_that_pages_do_not_compute_is_refused(kind: str, reason: str) -> None:
    with pytest.raises(TreepackError, match=reason):
        LocalEngine(tiny_family(kind).float(), WARM, options=SMALL)


def test_frequencies_of_rotary_positions_are_not_rounded_to_bfloat16() -> None:
    expected = dict(load_model(MODEL, dtype=torch.bfloat16).causal.named_buffers())
    engine = load_engine(MODEL, WARM, dtype=torch.bfloat16, options=SMALL)
    buffers = dict(engine._model.named_buffers())
    asyncio.run(engine.close())
    assert {each.dtype for each in engine._model.parameters()} == {torch.bfloat16}
    assert buffers.keys() == expected.keys()
    assert all(torch.equal(buffers[name], expected[name]) for name in expected)


def test_tokens_are_chosen_with_their_probabilities() -> None:
    logprobs = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0]).log()
    uniform = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    chosen = quantile_tokens(logprobs.expand(1000, -1).contiguous(), uniform)
    assert chosen.bincount(minlength=6).tolist() == [0, 200, 0, 500, 300, 0]
