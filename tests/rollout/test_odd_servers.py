"""Servers that answer oddly, without end, or packed: each answer is one sentence, and none is taken for another."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from support.engine_server import APIS, EngineServer, running
from support.watched_engines import fingerprint
from treepack.errors import TreepackError
from treepack.rollout.engine import EngineError, Segment
from treepack.rollout.episode import SingleTurn
from treepack.rollout.options import Sampling, TreeOptions
from treepack.rollout.query import Query
from treepack.rollout.sampler import sample_tree
from treepack.rollout.servers.dialects import SamplingRequest
from treepack.rollout.servers.server import SampleText, ServerEngine, connect, longest_answer

Change = Callable[[Any], Any]
IDS = np.array([5, 6, 7], np.int32)
SAMPLING = Sampling(stop_token_ids=(0,))
OPTIONS = TreeOptions(width=8, segment=6, depth=3, max_tokens=24, branches=2)


@dataclass
class OddServer(EngineServer):
    """A server whose answers at `path` are changed: a value is sent as JSON, bytes as they are."""

    path: str = APIS["generate"]
    change: Change | None = None
    packing: str | None = None

    def application(self) -> web.Application:
        application = super().application()
        application.middlewares.append(self._changed)
        return application

    @web.middleware
    async def _changed(self, request: web.Request, handler: Any) -> web.StreamResponse:
        response = await handler(request)
        if request.path != self.path or (self.change is None and self.packing is None):
            return response  # type: ignore[no-any-return]
        assert isinstance(response, web.Response)
        value = json.loads(response.body)  # type: ignore[arg-type]
        value = value if self.change is None else self.change(value)
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        headers = {} if self.packing is None else {"Content-Encoding": self.packing}
        if self.packing is not None:
            body = packed(body, self.packing)
        return web.Response(body=body, headers=headers, content_type="application/json")


def packed(body: bytes, packing: str) -> bytes:
    if packing == "gzip":
        return gzip.compress(body)
    return zlib.compress(body) if packing == "deflate" else body


def use(server: EngineServer, act: Callable[[ServerEngine], Awaitable[Any]], **options: Any) -> Any:
    """Connect to the running `server` and act on the engine."""

    async def run() -> Any:
        async with running(server) as url:
            engine = await connect(url, **{"sampling": SAMPLING, **options})
            try:
                return await act(engine)
            finally:
                await engine.close()

    return asyncio.run(run())


async def ask(engine: ServerEngine) -> list[Segment]:
    return await engine.extend(IDS, count=2, max_tokens=5, seed=7)


async def tree_of(engine: Any) -> Any:
    return await sample_tree(Query("q", "q", IDS), engine, OPTIONS, episode=SingleTurn(), seed=3)


def message(server: EngineServer, **options: Any) -> str:
    with pytest.raises(TreepackError) as error:
        use(server, ask, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def refusal(change: Change, api: str = "generate") -> str:
    """Return the sentence about an answer that is changed after the connection was made."""
    server = OddServer(api=api, path=APIS[api])

    async def act(engine: ServerEngine) -> list[Segment]:
        await ask(engine)
        server.change = change
        return await ask(engine)

    with pytest.raises(EngineError) as error:
        use(server, act)
    assert "\n" not in str(error.value)
    return str(error.value)


def put(*path: Any, value: Any) -> Change:
    """Return a function that replaces the value at `path` of an answer."""

    def change(answer: Any) -> Any:
        place = answer
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        return answer

    return change


def with_id(value: Any) -> Change:
    """Return a function that replaces the first token id of the first continuation, wherever vLLM repeats it."""

    def change(answer: Any) -> Any:
        choice = answer["choices"][0]
        choice["token_ids"][0] = choice["logprobs"]["content"][0]["token_id"] = value
        return answer

    return change


@pytest.mark.parametrize("value", [2**31, 2**63, 10**30, -1, 3.7, True, "1", None, [1], {}])
def test_a_token_id_that_is_none_is_refused(value: Any) -> None:
    assert "answered without token ids and one log-probability for each" in refusal(with_id(value))


def test_the_largest_token_id_is_read() -> None:
    server = OddServer()

    async def act(engine: ServerEngine) -> list[Segment]:
        await ask(engine)
        server.change = with_id(2**31 - 1)
        return await ask(engine)

    assert max(int(segment.tokens.max()) for segment in use(server, act)) == 2**31 - 1


@pytest.mark.parametrize("value", [5, 0.3, "-1.5", True, None, -9999, -1e5, [], {}])
def test_a_log_probability_that_is_none_is_refused(value: Any) -> None:
    change = put("choices", 0, "logprobs", "content", 0, "logprob", value=value)
    assert "one log-probability for each" in refusal(change)


@pytest.mark.parametrize(
    ("api", "change"),
    [
        ("generate", lambda answer: []),
        ("generate", lambda answer: "text"),
        ("generate", lambda answer: {"choices": None}),
        ("generate", put("choices", 0, value=None)),
        ("generate", put("choices", 0, "index", value="first")),
        ("generate", put("choices", 0, "token_ids", value="12")),
        ("generate", put("choices", 0, "token_ids", value=7)),
        ("generate", put("choices", 0, "finish_reason", value=["stop"])),
        ("generate", put("choices", 0, "weight_versions", value=[1])),
        ("generate", put("usage", value=[1])),
        ("generate", put("usage", "prompt_tokens", value=[1])),
        ("generate", put("usage", "prompt_tokens_details", value={"cached_tokens": "many"})),
        ("completions", put("choices", 0, "logprobs", "token_logprobs", value="abc")),
        ("completions", put("choices", 0, "logprobs", value=[1])),
        ("sglang", lambda answer: []),
        ("sglang", put(0, "meta_info", value=None)),
        ("sglang", put(0, "meta_info", "cached_tokens", value="many")),
        ("sglang", put(0, "meta_info", "prompt_tokens", value="many")),
        ("sglang", put(0, "meta_info", "finish_reason", value=None)),
        ("sglang", put(0, "meta_info", "output_token_logprobs", value=[[0.0]])),
    ],
)
def test_an_answer_of_another_form_is_one_sentence(api: str, change: Change) -> None:
    assert refusal(change, api).startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    "body", [b'{"choices": NaN}', b'{"choices": [}', b"<html>busy</html>", b"[" * 100_000, b"null"]
)
def test_an_answer_that_is_no_json_has_its_own_remedy(body: bytes) -> None:
    text = refusal(lambda answer: body)
    assert ": the answer is not JSON, in which NaN and Infinity are not allowed either (" in text
    assert text.endswith("; check the server's log, and a proxy before it")


@pytest.mark.parametrize(
    "models",
    [
        [],
        "models",
        {"data": None},
        {"data": "many"},
        {"data": [{"id": ["tiny"]}]},
        {"data": [{"id": "tiny", "max_model_len": "many"}]},
        {"data": [{"id": "tiny", "max_model_len": [4]}]},
    ],
)
def test_an_odd_list_of_models_is_one_sentence(models: Any) -> None:
    text = message(OddServer(path="/v1/models", change=lambda answer: models))
    assert '/v1/models: answers in another form than {"data": [{"id": "NAME", "max_model_len": 4096}]}; check' in text


@pytest.mark.parametrize("tokens", [7, "text", {"a": 1}, [[9]]])
def test_an_odd_answer_about_a_sample_text_is_another_tokenizer(tokens: Any) -> None:
    server = OddServer(tokens={"a b": [9]}, path="/tokenize", change=lambda answer: {"tokens": tokens})
    assert "has another tokenizer" in message(server, sample_text=SampleText("a b", [9]))


@pytest.mark.parametrize("likely", [None, [], [{"token_id": 1, "logprob": "a"}], [{"token_id": [1], "logprob": 0}]])
def test_odd_likely_tokens_are_one_sentence(likely: Any) -> None:
    change = put("choices", 0, "logprobs", "content", 0, "top_logprobs", value=likely)
    text = message(OddServer(change=change), sampling=Sampling(0.5))
    assert "answered likely tokens in another form" in text or "cannot be checked" in text


@pytest.mark.parametrize("host", ["a..b", "x" * 300, "[::1", "localhost:99999999"])
def test_a_host_that_cannot_be_one_is_one_sentence(host: str) -> None:
    with pytest.raises(TreepackError) as error:
        asyncio.run(connect(f"http://{host}", SAMPLING))
    assert "check the address" in str(error.value) or "start it first" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_key_that_no_header_can_hold_is_one_sentence() -> None:
    assert "check the address and the API key" in message(EngineServer(), api_key="a\nb")


@pytest.mark.parametrize("packing", ["gzip", "deflate"])
def test_packed_answers_are_the_same(packing: str) -> None:
    assert fingerprint(use(OddServer(packing=packing), tree_of)) == fingerprint(use(EngineServer(), tree_of))


def test_a_packing_that_was_not_asked_for_is_one_sentence() -> None:
    assert "is packed with br, which was not asked for" in message(OddServer(packing="br"))


@pytest.mark.parametrize("packing", [None, "gzip", "deflate"])
def test_an_answer_without_end_is_refused_at_its_bound(packing: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treepack.rollout.servers.server.LONGEST_ANSWER", 100_000)
    server = OddServer()

    async def act(engine: ServerEngine) -> list[Segment]:
        await ask(engine)
        server.packing = packing
        server.change = lambda answer: b" " * 99_000 + json.dumps(answer).encode()
        segments = await ask(engine)
        server.change = lambda answer: b" " * 5_000_000
        with pytest.raises(EngineError, match=r"the answer is longer than 0 MB, more than its request can need; check"):
            await ask(engine)
        server.change = None
        return segments + await ask(engine)

    assert len(use(server, act)) == 4  # the connections are of use afterwards


def test_the_bound_follows_from_the_request() -> None:
    def bound(count: int, max_tokens: int, *, routes: bool = False) -> int:
        return longest_answer(SamplingRequest(IDS, count, max_tokens, SAMPLING, routes=routes))

    assert bound(1, 1) == 64_000_000 + 1_000 + 36
    assert bound(8, 1000) - bound(1, 1) > 8_000 * 999
    assert bound(8, 1000, routes=True) > bound(8, 1000) + 8 * 1003 * 94 * 8 * 4  # 94 layers with 8 experts as int32
