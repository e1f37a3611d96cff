"""An engine behind HTTP gives the trees of the engine in process, and every defect of a server is one sentence."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest

from support.engine_server import APIS, VOCAB_SIZE, EngineServer, random_law, running, tempered
from support.refusal import refusal
from support.watched_engines import fingerprint
from treepack.errors import TreepackError
from treepack.rollout.engine import ABORT, EngineError, Segment, TemporaryError
from treepack.rollout.episode import SingleTurn
from treepack.rollout.options import Sampling, TreeOptions
from treepack.rollout.query import Query
from treepack.rollout.requests import LimitedEngine
from treepack.rollout.sampler import sample_tree
from treepack.rollout.servers.server import SampleText, ServerEngine, connect
from treepack.rollout.simulated import SimulatedEngine
from treepack.rollout.tree import TokenUsage

IDS = np.array([5, 6, 7], np.int32)
SAMPLING = Sampling(stop_token_ids=(0,))
Result = TypeVar("Result")
OPTIONS = TreeOptions(width=16, segment=6, depth=3, max_tokens=24, branches=2, fallback="random")


def use(server: EngineServer, act: Callable[[ServerEngine], Awaitable[Result]], **options: Any) -> Result:
    """Connect to the running `server` and act on the engine."""

    async def run() -> Result:
        async with running(server) as url:
            engine = await connect(url, **{"sampling": SAMPLING, **options})
            try:
                return await act(engine)
            finally:
                await engine.close()

    return asyncio.run(run())


async def ask(engine: ServerEngine | LimitedEngine) -> list[Segment]:
    return await engine.extend(IDS, count=2, max_tokens=5, seed=7)


def message(server: EngineServer, **options: Any) -> str:
    with pytest.raises(TreepackError) as error:
        use(server, ask, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


async def tree_of(engine: Any) -> Any:
    return await sample_tree(Query("q", "q", IDS), engine, OPTIONS, episode=SingleTurn(), seed=3)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_tree_over_http_is_the_tree_of_the_engine_in_process_bit_for_bit(api: str, temperature: float) -> None:
    law = random_law()
    sampling = Sampling(temperature, stop_token_ids=(0,))
    tree = use(EngineServer(law, api=api), tree_of, sampling=sampling)
    twin = asyncio.run(tree_of(SimulatedEngine(tempered(law, temperature))))
    assert any(node.is_fallback for node in twin.nodes())
    assert tree.usage.cached is not None
    assert fingerprint(tree)[:-1] == fingerprint(twin)[:-1]
    assert replace(tree.usage, cached=None) == twin.usage
    assert isinstance(tree.usage, TokenUsage)


@pytest.mark.parametrize("api", APIS)
def test_a_call_is_one_request_with_all_sampling_parameters(api: str) -> None:
    server = EngineServer(api=api)
    sampling = Sampling(0.7, top_p=0.9, top_k=9, stop_token_ids=(0, 4))
    use(server, ask, sampling=sampling)
    request = server.requests[-1]
    fields: Any = request if api == "completions" else request["sampling_params"]
    if api == "sglang":
        assert request["input_ids"] == [IDS.tolist()] * 2
        assert [one["sampling_seed"] for one in fields] == [7, 8]
        (fields,) = [one for one in fields if one["sampling_seed"] == 7]
        assert request["return_logprob"]
        assert "ignore_eos" not in fields
    else:
        assert (fields["n"], fields["seed"], fields["ignore_eos"]) == (2, 7, True)
    expected = {"temperature": 0.7, "top_p": 0.9, "top_k": 9, "stop_token_ids": [0, 4], "repetition_penalty": 1.0}
    assert expected.items() <= fields.items()
    # One for the largest id, and one for the call.
    assert [IDS.tolist() in (one.get("token_ids"), one.get("prompt")) for one in server.requests[-2:]] == (
        [False, api != "sglang"]
    )


def test_seeds_can_be_left_out_and_sglang_gets_none_that_it_would_ignore() -> None:
    unseeded, ignoring = EngineServer(), EngineServer(api="sglang", deterministic=False)
    use(unseeded, ask, seeded=False)
    use(ignoring, ask)
    assert "seed" not in unseeded.requests[-1]["sampling_params"]
    assert ignoring.requests[-1]["input_ids"] == IDS.tolist()
    assert ignoring.requests[-1]["sampling_params"]["n"] == 2


@pytest.mark.parametrize("api", ["generate", "sglang"])
def test_a_published_version_marks_segments_and_salts_the_cache(api: str) -> None:
    async def act(engine: ServerEngine) -> tuple[list[Segment], list[Segment]]:
        before = await ask(engine)
        await engine.publish("7")
        return before, await ask(engine)

    server = EngineServer(api=api)
    before, after = use(server, act)
    assert [segment.version for segment in before + after] == ["", "", "7", "7"]
    salt = "extra_key" if api == "sglang" else "cache_salt"
    assert salt not in server.requests[-2]
    assert server.requests[-1][salt] == "7"
    server.version = "12"
    assert [segment.version for segment in use(server, ask)] == ["12", "12"]


def test_a_version_that_is_published_during_a_request_does_not_mark_its_answer() -> None:
    async def act(engine: ServerEngine) -> list[Segment]:
        await ask(engine)
        server.pause = 0.2
        call = asyncio.ensure_future(ask(engine))
        while len(server.requests) < 4:
            await asyncio.sleep(0.01)
        await engine.publish("7")
        return await call

    server = EngineServer()
    assert [segment.version for segment in use(server, act)] == ["", ""]


def test_without_stop_tokens_the_end_of_sequence_of_the_server_counts() -> None:
    server = EngineServer()
    use(server, ask, sampling=Sampling())
    assert server.requests[-1]["sampling_params"]["ignore_eos"] is False


@pytest.mark.parametrize("api", APIS)
def test_log_probabilities_of_another_temperature_are_refused(api: str) -> None:
    text = message(EngineServer(api=api, raw=True), sampling=Sampling(0.7))
    assert "belong to temperature 1 and not to 0.7" in text
    assert ("SGLANG_RETURN_ORIGINAL_LOGPROB" if api == "sglang" else "--logprobs-mode processed_logprobs") in text
    # At temperature 1 both are the same.
    assert len(use(EngineServer(api=api, raw=True), ask)) == 2


def test_equal_probabilities_leave_the_temperature_unknown() -> None:
    law = random_law()
    law.transition[:] = 1 / VOCAB_SIZE
    assert "cannot be checked; sample at temperature 1" in message(EngineServer(law, raw=True), sampling=Sampling(0.7))


def test_an_unreachable_server_is_one_sentence_with_its_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(EngineError, match=rf"^{url}: no answer \(.*\); start it first$"):
        asyncio.run(connect(url, SAMPLING))


def test_an_address_without_a_server_in_it_is_refused() -> None:
    assert refusal(asyncio.run, connect("htp://x", SAMPLING)).startswith("htp://x: is not the address of a server")


def test_a_missing_package_is_one_sentence_with_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert refusal(asyncio.run, connect("http://x", SAMPLING)).startswith(
        "http://x: a server needs the package aiohttp; run pip install"
    )


def test_the_address_may_end_like_that_of_an_openai_client() -> None:
    async def act() -> str:
        async with running(EngineServer()) as url:
            engine = await connect(f"{url}/v1/", SAMPLING)
            await engine.close()
            return engine.url.removeprefix(url)

    assert asyncio.run(act()) == ""


def test_a_server_without_any_of_the_apis_names_what_was_tried() -> None:
    async def act() -> None:
        async with running(replace(EngineServer(), api="completions", statuses=[400])) as url:
            await connect(url, SAMPLING)

    with pytest.raises(EngineError) as error:
        asyncio.run(act())
    text = str(error.value)
    assert "vLLM's /inference/v1/generate (403: Scale-out endpoints are disabled." in text
    assert "SGLang's /generate (not there)" in text
    assert "vLLM's /v1/completions (400: try again)" in text


@pytest.mark.parametrize("api", APIS)
def test_answers_without_token_ids_are_refused(api: str) -> None:
    text = message(EngineServer(api=api, has_ids=False))
    assert f"{APIS[api]} (answers without token ids and log-probabilities)" in text
    assert "start vLLM from 0.10.2 on" in text


def test_another_tokenizer_is_noticed_by_a_sample_text() -> None:
    server = EngineServer(tokens={"a b": [3, 4]})
    assert len(use(server, ask, sample_text=SampleText("a b", [3, 4]))) == 2
    assert "'a b' has the ids [3, 4] there and [9] here" in message(server, sample_text=SampleText("a b", [9]))
    # A server without a tokenizer cannot be asked.
    assert len(use(EngineServer(), ask, sample_text=SampleText("a b", [9]))) == 2


@pytest.mark.parametrize("api", APIS)
def test_an_id_outside_of_the_vocabulary_is_refused_before_it_is_sent(api: str) -> None:
    server = EngineServer(api=api)

    async def act(engine: ServerEngine) -> list[Segment]:
        await ask(engine)
        return await engine.extend(np.array([1, VOCAB_SIZE], np.int32), count=1, max_tokens=5, seed=7)

    with pytest.raises(EngineError, match=f"refuses the token id {VOCAB_SIZE} .*use the tokenizer of the server's"):
        use(server, act)
    assert not any(VOCAB_SIZE in np.ravel(one.get("token_ids", one.get("prompt", []))) for one in server.requests)


def test_a_sequence_longer_than_the_server_takes_is_refused() -> None:
    assert "3 tokens and 5 new ones are more than the 7 that the server takes" in message(EngineServer(max_len=7))
    assert len(use(EngineServer(max_len=8), ask)) == 2


def test_a_prompt_that_the_server_changed_is_refused() -> None:
    assert "continued 2 tokens and got 3" in message(EngineServer(truncate=2))


def test_a_model_that_the_server_does_not_serve_is_refused() -> None:
    server = EngineServer(models=("a", "b"))
    assert "serves no model 'c'; it has a, b" in message(server, model="c")
    use(server, ask, model="b")
    assert server.requests[-1]["model"] == "b"
    use(server, ask)
    assert server.requests[-1]["model"] == "a"


def test_a_wrong_api_key_is_refused() -> None:
    server = EngineServer(api_key="secret")
    assert "check the API key" in message(server)
    assert len(use(server, ask, api_key="secret")) == 2


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_overload_is_temporary_and_another_attempt_gets_the_same_answer(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treepack.rollout.requests.FIRST_PAUSE", 0.0)
    expected = use(EngineServer(), ask)

    async def act(engine: ServerEngine) -> list[Segment]:
        server.statuses = [200, status]
        return await ask(LimitedEngine(engine, max_requests=1, attempts=2, timeout=9))

    server = EngineServer()
    assert [one.tokens.tolist() for one in use(server, act)] == [one.tokens.tolist() for one in expected]
    assert not server.statuses


def test_other_refusals_are_final_with_the_words_of_the_server_on_one_line() -> None:
    async def act(engine: ServerEngine) -> list[Segment]:
        server.statuses = [200, 418]
        return await ask(LimitedEngine(engine, max_requests=1, attempts=9, timeout=9))

    server = EngineServer()
    with pytest.raises(EngineError, match=r"status 418 \(try again\); check the request's options$"):
        use(server, act)
    assert len(server.requests) == 3


def test_a_server_that_ends_in_the_middle_is_a_temporary_failure() -> None:
    async def act() -> None:
        server = EngineServer()
        async with running(server) as url:
            engine = await connect(url, SAMPLING)
            server.pause = 60.0
            request = asyncio.ensure_future(ask(engine))
            while len(server.requests) < 2:
                await asyncio.sleep(0.01)
        try:
            await request
        finally:
            await engine.close()

    with pytest.raises(TemporaryError, match=r"no answer .*; check that the server runs there$"):
        asyncio.run(act())


def test_an_abort_is_temporary_and_an_unknown_reason_is_not() -> None:
    async def act(engine: ServerEngine) -> list[Segment]:
        return await ask(LimitedEngine(engine, max_requests=1, attempts=1, timeout=9))

    assert [one.finish for one in use(EngineServer(finish=ABORT), ask)] == [ABORT, ABORT]
    with pytest.raises(EngineError, match="the engine aborted a continuation"):
        use(EngineServer(finish=ABORT), act)
    with pytest.raises(EngineError, match="ended a continuation with 'repetition'; expected stop or length"):
        use(EngineServer(finish="repetition"), tree_of)


def test_a_cancelled_call_closes_its_request_at_the_server() -> None:
    async def act(engine: ServerEngine) -> int:
        server.pause = 60.0
        call = asyncio.ensure_future(ask(engine))
        while len(server.requests) < 2:
            await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        while not server.cancelled:
            await asyncio.sleep(0.01)
        server.pause = 0.0
        return len(await ask(engine))

    server = EngineServer()
    assert use(server, act) == 2
