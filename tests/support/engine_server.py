"""A local HTTP server with one of the APIs that treepack.rollout.servers.dialects speaks, over a simulated law.

EngineServer   its law, API and defects, and the requests it has answered
running        the server in the event loop of the test: `async with running(server) as url`
in_thread      the server beside a test that has no event loop: `with in_thread(server) as url`

Its answers have the fields of vLLM 0.32 and SGLang 0.5.23 that the client reads. For one seed they are bit for bit
those of a SimulatedEngine with the same law.
"""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from support.markov_law import MarkovLaw
from treepack.rollout.engine import Segment
from treepack.rollout.simulated import SimulatedEngine

APIS = {"generate": "/inference/v1/generate", "completions": "/v1/completions", "sglang": "/generate"}
VOCAB_SIZE = 64


def random_law(*, stop: int = 0) -> MarkovLaw:
    """A law over VOCAB_SIZE tokens that stops after some 20 tokens."""
    transition = np.random.default_rng(3).dirichlet(np.full(VOCAB_SIZE, 0.3), size=VOCAB_SIZE) + 1e-6
    transition[:, stop] = transition.sum(axis=1) / 20
    return MarkovLaw(transition / transition.sum(axis=1, keepdims=True), stop=stop)


def tempered(law: MarkovLaw, temperature: float) -> MarkovLaw:
    """The law with all probabilities to the power of 1 / temperature, which is 1 for the law itself."""
    if temperature == 1:
        return law
    powers = law.transition ** (1 / temperature)
    return MarkovLaw(powers / powers.sum(axis=1, keepdims=True), stop=law.stop)


@dataclass
class EngineServer:
    """A server of the `law` with the API `api`, a key of APIS.

    `raw` answers with log-probabilities of temperature 1 whatever the request's is, as vLLM does by default.
    `statuses` are those of the next answers, before any is a success; `finish` replaces the finish reason.
    `route_layers` are the layers whose experts it returns, see `experts_of`, 0 for none.
    """

    law: MarkovLaw = field(default_factory=random_law)
    api: str = "generate"
    models: tuple[str, ...] = ("tiny",)
    max_len: int = 4096
    raw: bool = False
    has_ids: bool = True
    api_key: str | None = None
    tokens: dict[str, list[int]] | None = None
    deterministic: bool = True
    truncate: int | None = None
    pause: float = 0.0
    finish: str | None = None
    route_layers: int = 0
    version: str = "default"
    statuses: list[int] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    cancelled: int = 0

    def application(self) -> web.Application:
        application = web.Application(middlewares=[self._guard])
        application.router.add_get("/v1/models", self._models)
        application.router.add_post(APIS[self.api], self._answer)
        if self.api == "completions":
            application.router.add_post(APIS["generate"], self._disabled)
        if self.api == "sglang":
            application.router.add_get("/get_server_info", self._information)
        if self.tokens is not None:
            application.router.add_post("/tokenize", self._tokenize)
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        response: web.StreamResponse = await handler(request)
        return response

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name, "max_model_len": self.max_len} for name in self.models]})

    async def _disabled(self, request: web.Request) -> web.Response:
        return error(403, "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out.")

    async def _information(self, request: web.Request) -> web.Response:
        return web.json_response({"enable_deterministic_inference": self.deterministic})

    async def _tokenize(self, request: web.Request) -> web.Response:
        assert self.tokens is not None
        return web.json_response({"tokens": self.tokens[(await request.json())["prompt"]]})

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        try:
            await asyncio.sleep(self.pause)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.statuses and (status := self.statuses.pop(0)) != 200:
            return error(status, "try\nagain")
        ids, options, count, seed = self._wish(body)
        size = len(self.law.transition)
        if any(int(name) >= size for name in options.get("logit_bias", ())):
            return error(400, f"out-of-vocab token ids. Vocabulary size: {size}")
        temperature = options["temperature"]
        law = tempered(self.law, temperature)
        size = options["max_new_tokens" if self.api == "sglang" else "max_tokens"]
        segments = await SimulatedEngine(law).extend(np.array(ids, np.int32), count=count, max_tokens=size, seed=seed)
        likely = self._likely(self.law if self.raw else law, ids[-1])
        prompt = ids[: self.truncate]
        if self.api == "sglang":
            choices = [self._sglang_choice(segment, len(prompt), likely) for segment in segments]
            if body.get("return_routed_experts") and self.route_layers:
                for choice, rows in zip(choices, self._experts(ids, segments), strict=True):
                    choice["meta_info"]["routed_experts"] = base64.b64encode(rows.astype("<i4").tobytes()).decode()
            return web.json_response(choices if len(choices) > 1 or isinstance(ids, tuple) else choices[0])
        choices = [self._choice(segment, number, likely) for number, segment in enumerate(segments)]
        if self.route_layers:
            for choice, rows in zip(choices, self._experts(ids, segments), strict=True):
                file = io.BytesIO()
                np.save(file, rows.astype(np.uint8))
                choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": len(ids) // 16 * 16}}
        return web.json_response({"choices": choices[::-1], "usage": usage})

    def _experts(self, ids: Any, segments: list[Segment]) -> list[Any]:
        paths = [np.concatenate([np.array(ids), segment.tokens])[:-1] for segment in segments]
        return [experts_of(path, self.route_layers) for path in paths]

    def _wish(self, body: dict[str, Any]) -> tuple[Any, dict[str, Any], int, int]:
        """Return the prompt, the sampling parameters, the number of continuations and the seed."""
        if self.api == "completions":
            return body["prompt"], body, body["n"], body.get("seed", 0)
        options = body["sampling_params"]
        if self.api == "generate":
            return body["token_ids"], options, options["n"], options.get("seed", 0)
        if isinstance(options, dict):
            return body["input_ids"], options, options["n"], 0
        seeds = [entry["sampling_seed"] for entry in options]
        assert seeds == list(range(seeds[0], seeds[0] + len(seeds)))
        assert all(ids == body["input_ids"][0] for ids in body["input_ids"])
        return tuple(body["input_ids"][0]), options[0], len(options), seeds[0]

    def _likely(self, law: MarkovLaw, last: int) -> list[tuple[int, float]]:
        order = np.argsort(-law.transition[last], kind="stable")[:5]
        return [(int(token), float(np.log(law.transition[last, token]))) for token in order]

    def _choice(self, segment: Segment, number: int, likely: list[tuple[int, float]]) -> dict[str, Any]:
        tokens, logprobs = values(segment)
        choice: dict[str, Any] = {"index": number, "finish_reason": self.finish or segment.finish}
        if self.has_ids:
            choice["token_ids"] = tokens
        if self.api == "generate":
            choice["weight_versions"] = [{"version": self.version, "start": 0, "end": len(tokens)}]
            top = [{"token_id": token, "logprob": value} for token, value in likely]
            pairs = zip(tokens, logprobs, strict=True)
            content = [{"token_id": token, "logprob": value, "top_logprobs": top} for token, value in pairs]
            return choice | {"logprobs": {"content": content}}
        names = {f"token_id:{token}": value for token, value in likely}
        return choice | {"logprobs": {"token_logprobs": logprobs, "top_logprobs": [names] * len(tokens)}}

    def _sglang_choice(self, segment: Segment, num_prompt: int, likely: list[tuple[int, float]]) -> dict[str, Any]:
        tokens, logprobs = values(segment)
        meta = {
            "finish_reason": {"type": self.finish or segment.finish},
            "prompt_tokens": num_prompt,
            "cached_tokens": num_prompt - 1,
            "weight_version": self.version,
            "output_token_logprobs": [[value, token, None] for token, value in zip(tokens, logprobs, strict=True)],
            "output_top_logprobs": [[[value, token, None] for token, value in likely]] * len(tokens),
        }
        return {"text": "", "meta_info": meta} | ({"output_ids": tokens} if self.has_ids else {})


def experts_of(ids: Any, layers: int) -> Any:
    """The two experts of each of `ids` in each layer, [len(ids), layers, 2]; they depend on the token and its place."""
    first = (np.array(ids)[:, None] + np.arange(len(ids))[:, None] + np.arange(layers)) % 7
    return np.stack([first, first + 1], axis=-1)


def values(segment: Segment) -> tuple[list[int], list[float]]:
    assert segment.logprobs is not None
    return segment.tokens.tolist(), segment.logprobs.tolist()


def error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


@asynccontextmanager
async def running(server: EngineServer, *, port: int = 0) -> AsyncIterator[str]:
    runner = web.AppRunner(server.application(), shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextmanager
def in_thread(server: EngineServer) -> Iterator[str]:
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    started: list[str] = []
    ready = threading.Event()

    async def serve() -> None:
        async with running(server) as url:
            started.append(url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield started[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
