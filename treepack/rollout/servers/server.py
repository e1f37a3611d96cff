"""An engine at an HTTP address: a vLLM or SGLang server that is already running.

    connect("http://localhost:8000", Sampling(temperature=0.7)) -> ServerEngine

`connect` finds out which API the server has and whether its answers can be used, before anything is sampled:

    reachable, and one of treepack.rollout.servers.dialects       continuations with token ids and log-probabilities
    temperature                                          log-probabilities at the temperature, not raw ones
    tokenizer                                            a sample text has the caller's token ids

Processes, weights and ports of the server are left to its owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from treepack.rollout.engine import ABORT, EngineError, Segment, TemporaryError
from treepack.rollout.options import Sampling
from treepack.rollout.servers.dialects import (
    DIALECTS,
    UNREADABLE,
    SamplingRequest,
    ServerDialect,
    read_answer_part,
    read_continuations,
)
from treepack.rollout.servers.http_client import LONGEST_ANSWER, HttpClient
from treepack.rollout.servers.server_routes import routes_of_answer
from treepack.trajectory import Int32

_ALTERNATIVES = 5  # most likely tokens that the check of the temperature compares; servers allow 20 by default
_LEAST_SPREAD = 0.02  # nats between them, from which on rounding cannot change the verdict
_BYTES_PER_TOKEN = 1_000  # of a new token: its id, its log-probability, and their names; servers send 100 to 200
_BYTES_PER_ROUTES = 8_000  # of the experts of one token: 1,500 of them as int32 in base64
_PROBES = (range(1, 9), range(8, 64), (3,), (11, 7, 5))  # prompts of small ids, which every vocabulary contains


@dataclass(frozen=True, slots=True)
class SampleText:
    """A text with its token ids in the caller's tokenizer, without special tokens: `ids` of `text`."""

    text: str
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class _ServerFacts:
    """The API of a server, the name of its model, and the longest sequence that it takes, None if it is not reported.

    `route_layers` are the layers of the model, if the experts of its routers are kept and the server reports none.
    """

    dialect: ServerDialect
    model: str | None
    max_len: int | None
    is_seeded: bool
    keeps_routes: bool = False
    route_layers: int | None = None


async def connect(
    url: str,
    sampling: Sampling,
    *,
    model: str | None = None,
    api_key: str | None = None,
    sample_text: SampleText | None = None,
    seeded: bool = True,
    keep_routes: bool = False,
    route_layers: int | None = None,
) -> ServerEngine:
    """Connect to the server at `url`, check that its answers can be used, and return it as an engine.

    Args:
        url: address of the server, such as http://localhost:8000.
        sampling: distribution of all requests. Without stop tokens, the model's own end of sequence ends a turn.
        model: name at the server; needed only if it serves several.
        api_key: sent as a bearer token.
        sample_text: a text and its ids, to notice that the server has another tokenizer.
        seeded: send a seed with each request, so that a run is repeatable. vLLM draws the random numbers of seeded
            requests one by one, which costs time if many run.
        keep_routes: keep the experts that the routers of a mixture choose, see `Segment.routes`.
        route_layers: layers of the model, which SGLang does not send beside the experts.

    Raises:
        TreepackError: the server is unreachable, has none of the APIs, answers without token ids, has another
            tokenizer or model, returns log-probabilities at a different temperature, or lacks experts that are to be
            kept.
    """
    client = HttpClient(url, api_key=api_key)
    try:
        name, max_len = await _served_model(client, model)
        dialect = await _find_dialect(client, name)
        if sampling.temperature != 1:
            await _check_temperature(client, dialect, name, sampling)
        if sample_text is not None:
            await _check_tokenizer(client, name, sample_text)
        if keep_routes:
            await _check_routes(client, dialect, name, route_layers)
        is_seeded = seeded and await _uses_seeds(client, dialect)
    except BaseException:
        await client.close()
        raise
    return ServerEngine(client, _ServerFacts(dialect, name, max_len, is_seeded, keep_routes, route_layers), sampling)


class ServerEngine:
    """An engine that sends each call to a server as one request; made by `connect`."""

    def __init__(self, client: HttpClient, found: _ServerFacts, sampling: Sampling) -> None:
        """Take over the open `client`."""
        self.found = found
        self._client = client
        self._sampling = sampling
        self._version = ""
        self._largest_id = -1
        self._checking = asyncio.Lock()

    @property
    def url(self) -> str:
        """Address of the server."""
        return self._client.url

    @property
    def sampling(self) -> Sampling:
        """The distribution of all requests."""
        return self._sampling

    async def extend(self, ids: Int32, *, count: int, max_tokens: int, seed: int) -> list[Segment]:
        """Continue `ids` int32 [n] `count` times by at most `max_tokens` tokens, in one request.

        Raises:
            TemporaryError: the server is overloaded, restarts, or closed the connection.
            EngineError: the server refused the request, or its answer cannot be used.
        """
        dialect, longest = self.found.dialect, self.found.max_len
        if longest is not None and len(ids) + max_tokens > longest:
            raise EngineError(
                f"{self.url}: {len(ids)} tokens and {max_tokens} new ones are more than the {longest} that the server "
                "takes; lower --max-tokens, or start the server with room for longer sequences"
            )
        await self._check_ids(ids)
        # A policy that is published while the server answers did not sample the answer, or not all of it.
        version = self._version
        wish = SamplingRequest(
            ids,
            count,
            max_tokens,
            self._sampling,
            seed=seed if self.found.is_seeded else None,
            model=self.found.model,
            salt=version,
            routes=self.found.keeps_routes,
        )
        answer = await self._client.post(dialect.path, dialect.body(wish), longest=longest_answer(wish))
        value = self._client.checked(answer, dialect.path)
        segments = read_continuations(dialect, value, url=self.url)
        num_prompt = read_answer_part(dialect.num_prompt, dialect, value, "the size of the prompt", url=self.url)
        if num_prompt is not None and num_prompt != len(ids):
            raise EngineError(
                f"{self.url}: the server continued {str(num_prompt)[:40]} tokens and got {len(ids)}; "
                "switch off truncation and special tokens in its settings"
            )
        named = [replace(segment, version=segment.version or version) for segment in segments]
        # A continuation that the server aborted has no experts, and is asked for again.
        if not self.found.keeps_routes or any(segment.finish == ABORT for segment in named):
            return named
        sizes = [len(ids) + len(segment.tokens) - 1 for segment in named]
        routes = routes_of_answer(dialect, value, sizes=sizes, layers=self.found.route_layers, url=self.url)
        return [replace(segment, routes=rows) for segment, rows in zip(named, routes, strict=True)]

    async def _check_ids(self, ids: Int32) -> None:
        """Ask the server once for each new largest id, because a wrong one can kill its engine."""
        largest = int(ids.max())
        if largest <= self._largest_id:
            return
        async with self._checking:
            if largest <= self._largest_id:
                return
            dialect = self.found.dialect
            wish = SamplingRequest(ids[:1] * 0, 1, 1, Sampling(), model=self.found.model, probed_id=largest)
            answer = await self._client.post(dialect.path, dialect.body(wish))
            if answer.status in (400, 422):
                raise EngineError(
                    f"{self.url}: refuses the token id {largest} ({answer.message}); use the tokenizer of the "
                    "server's model"
                )
            self._client.checked(answer, dialect.path)
            self._largest_id = largest

    async def publish(self, version: str) -> None:
        """Name the policy of the segments to come; the server's cache keeps their keys apart from older ones."""
        self._version = version

    async def close(self) -> None:
        """Close all connections; the server then aborts their requests."""
        await self._client.close()


async def _served_model(client: HttpClient, model: str | None) -> tuple[str | None, int | None]:
    """Return the name and the longest sequence of `model`, or of the first one that the server lists."""
    try:
        answer = await client.get("/v1/models")
    except TemporaryError as error:
        raise EngineError(f"{str(error).removesuffix('check that the server runs there')}start it first") from error
    if answer.status == 404:
        return model, None
    value = client.checked(answer, "/v1/models")
    models = _models(value, client.url)
    if model is not None and models and model not in models:
        names = ", ".join(models)
        raise EngineError(f"{client.url}: serves no model {model!r}; it has {names}, so pass one of these names")
    name = model if model is not None else next(iter(models), None)
    return name, models.get(name or "")


def _models(value: Any, url: str) -> dict[str, int | None]:
    """Return the models of an answer, and the longest sequence of each if the server reports it.

    Raises:
        EngineError: the answer has another form.
    """
    entries = value.get("data", []) if isinstance(value, dict) else None
    if isinstance(entries, list):
        pairs = [
            (entry["id"], entry.get("max_model_len")) for entry in entries if isinstance(entry, dict) and "id" in entry
        ]
        if all(isinstance(name, str) and (size is None or type(size) is int) for name, size in pairs):
            return dict(pairs)
    raise EngineError(
        f'{url}/v1/models: answers in another form than {{"data": [{{"id": "NAME", "max_model_len": 4096}}]}}; check '
        "that a vLLM or SGLang server answers there"
    )


def longest_answer(wish: SamplingRequest) -> int:
    """Return the maximum of bytes that an answer to `wish` can need; a longer one is not read."""
    new, old = wish.count * wish.max_tokens, wish.count * len(wish.ids)
    # A server may send the prompt back with each continuation, as ids of at most 10 digits.
    size = LONGEST_ANSWER + _BYTES_PER_TOKEN * new + 12 * old
    return size + _BYTES_PER_ROUTES * (new + old) if wish.routes else size


async def _find_dialect(client: HttpClient, model: str | None) -> ServerDialect:
    """Return the first API that continues a prompt of token ids and answers with token ids."""
    tried = []
    for dialect in DIALECTS:
        wish = SamplingRequest(np.array([1, 2], np.int32), 1, 1, Sampling(), model=model)
        answer = await client.post(dialect.path, dialect.body(wish))
        if answer.status == 401:
            client.checked(answer, dialect.path)
        if answer.status != 200:
            # vLLM answers 403 on a path that is switched off, and 404 or 405 if there is none.
            reason = "not there" if answer.status in (404, 405) else f"{answer.status}: {answer.message}"
            tried.append(f"{dialect.name}'s {dialect.path} ({reason.rstrip('.')})")
            continue
        try:
            dialect.segments(answer.value)
        except UNREADABLE:
            tried.append(f"{dialect.name}'s {dialect.path} (answers without token ids and log-probabilities)")
            continue
        return dialect
    raise EngineError(
        f"{client.url}: no API that continues token ids, tried {', '.join(tried)}; start vLLM from 0.10.2 on, best "
        "with --enable-scale-out, or SGLang"
    )


async def _check_temperature(client: HttpClient, dialect: ServerDialect, model: str | None, sampling: Sampling) -> None:
    """Check that log-probabilities change with the temperature.

    The difference between the log-probabilities of two tokens is d at temperature 1, d / 2 at temperature 2, and d
    again if the server ignores the temperature.
    """
    for probe in _PROBES:
        at = []
        for temperature in (1.0, 2.0):
            wish = SamplingRequest(
                np.array(probe, np.int32), 1, 1, Sampling(temperature), seed=0, model=model, alternatives=_ALTERNATIVES
            )
            answer = await client.post(dialect.path, dialect.body(wish))
            value = client.checked(answer, dialect.path)
            at.append(read_answer_part(_likely(dialect), dialect, value, "likely tokens", url=client.url))
        # The sampled token is among them too and differs, so only tokens of both answers are compared.
        common = sorted(at[0].keys() & at[1].keys(), key=at[0].__getitem__)
        if not common or (spread := at[0][common[-1]] - at[0][common[0]]) < _LEAST_SPREAD:
            continue
        if (at[1][common[-1]] - at[1][common[0]]) / spread > 0.75:
            remedy = (
                "unset SGLANG_RETURN_ORIGINAL_LOGPROB"
                if dialect.name == "SGLang"
                else "start it with --logprobs-mode processed_logprobs"
            )
            raise EngineError(
                f"{client.url}: the server's log-probabilities belong to temperature 1 and not to "
                f"{sampling.temperature:g}; {remedy}, or sample at temperature 1"
            )
        return
    raise EngineError(
        f"{client.url}: the likeliest tokens have equal probabilities, so the temperature of the log-probabilities "
        "cannot be checked; sample at temperature 1"
    )


def _likely(dialect: ServerDialect) -> Callable[[Any], dict[int, float]]:
    """Return a reader of the log-probabilities of the likely first tokens that refuses other values than numbers."""

    def read_first(answer: Any) -> dict[int, float]:
        first = dialect.first(answer)
        if not set(map(type, first)) <= {int} or not set(map(type, first.values())) <= {int, float}:
            raise TypeError("token ids or log-probabilities that are not numbers")
        return first

    return read_first


async def _check_tokenizer(client: HttpClient, model: str | None, sample: SampleText) -> None:
    """Compare token ids of a text, if the server has a tokenizer and an address for it."""
    body = {"prompt": sample.text, "add_special_tokens": False} | ({"model": model} if model else {})
    answer = await client.post("/tokenize", body)
    tokens = answer.value.get("tokens") if answer.status == 200 and isinstance(answer.value, dict) else None
    if tokens is not None and tokens != list(sample.ids):
        shown = tokens[:8] if isinstance(tokens, list) else tokens
        raise EngineError(
            f"{client.url}: has another tokenizer: {sample.text!r} has the ids {str(shown)[:100]} there and "
            f"{list(sample.ids)[:8]} here; pass the tokenizer of the server's model"
        )


async def _check_routes(client: HttpClient, dialect: ServerDialect, model: str | None, layers: int | None) -> None:
    """Check that the server returns the experts of a short request."""
    wish = SamplingRequest(np.array([1, 2], np.int32), 1, 1, Sampling(), model=model, routes=True)
    answer = client.checked(await client.post(dialect.path, dialect.body(wish)), dialect.path)
    routes_of_answer(dialect, answer, sizes=[2], layers=layers, url=client.url)


async def _uses_seeds(client: HttpClient, dialect: ServerDialect) -> bool:
    """Return False for an SGLang server that ignores seeds; then its `n` shares one prefill among continuations."""
    if dialect.name != "SGLang":
        return True
    answer = await client.get("/get_server_info")
    if answer.status != 200 or not isinstance(answer.value, dict):
        return True
    return bool(answer.value.get("enable_deterministic_inference", True))
