"""Requests and answers of the server APIs that continue token ids.

    vLLM      POST /inference/v1/generate   token ids in and out; the server needs --enable-scale-out or --tokens-only
    SGLang    POST /generate                token ids in and out
    vLLM      POST /v1/completions          a prompt of token ids; answers with token ids from version 0.10.2 on

SamplingRequest --ServerDialect.body--> JSON of the request
JSON of the answer --ServerDialect.segments--> [Segment]

Chat completions are never used: a server renders and tokenizes messages again, and the ids would differ from the
rollout. The fields belong to vLLM 0.32 and SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from treepack.rollout.engine import ABORT, EngineError, Segment
from treepack.rollout.options import Sampling
from treepack.trajectory import Int32

_Json = dict[str, Any]
_T = TypeVar("_T")

# vLLM sends this number in place of a log-probability that is missing, infinite or not a number.
_NO_LOGPROB = -9999.0
_LARGEST_LOGPROB = 0.25  # half a unit in the last place of a logit of 64 in bfloat16; exact ones are at most 0
_LARGEST_ID = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """Everything that a request asks for: `count` continuations of `ids` by at most `max_tokens` tokens.

    `seed` is None to leave the choice to the server. `salt` keeps cached keys of other policies apart, "" for none.
    `alternatives` is the number of most likely tokens whose log-probabilities are wanted too. A `probed_id` makes a
    server refuse the request if its vocabulary does not contain the id. With `routes`, the experts of all tokens are
    wanted too, see `server_routes`.
    """

    ids: Int32
    count: int
    max_tokens: int
    sampling: Sampling
    seed: int | None = None
    model: str | None = None
    salt: str = ""
    alternatives: int = 0
    probed_id: int | None = None
    routes: bool = False


@dataclass(frozen=True, slots=True)
class ServerDialect:
    """One API: its `path`, the JSON `body` of a request, and readers of the answer.

    All readers raise one of `UNREADABLE` if the answer has another form. `first` returns the log-probabilities of the
    likely first tokens, if the request has `alternatives`. `num_prompt` returns the number of prompt tokens that the
    server counted, None if it is not reported. `routes` returns the experts of each of the `segments` as the server has
    encoded them, or None.
    """

    name: str
    path: str
    body: Callable[[SamplingRequest], _Json]
    segments: Callable[[Any], list[Segment]]
    first: Callable[[Any], dict[int, float]]
    num_prompt: Callable[[Any], int | None]
    routes: Callable[[Any], list[Any]]


def _sampling_fields(wish: SamplingRequest) -> _Json:
    """Return the fields that the three APIs share. All are explicit, because servers have different defaults."""
    sampling = wish.sampling
    fields: _Json = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        # Old servers refuse 0 and new ones take -1 for the whole vocabulary.
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    if wish.probed_id is not None:
        # A bias of 0 changes nothing, but both servers refuse an id outside of their vocabulary here. They do not check
        # the ids of a prompt everywhere: the engine process of a vLLM server without a tokenizer dies of a wrong one.
        fields["logit_bias"] = {str(wish.probed_id): 0.0}
    return fields


def _vllm_fields(wish: SamplingRequest) -> _Json:
    fields = _sampling_fields(wish) | {
        "n": wish.count,
        "max_tokens": wish.max_tokens,
        "logprobs": wish.alternatives,
        # Without stop tokens, the model's own end of sequence ends a continuation.
        "ignore_eos": bool(wish.sampling.stop_token_ids),
    }
    # Continuation i gets seed + i, so the continuations of one request differ.
    return fields if wish.seed is None else fields | {"seed": wish.seed}


def _vllm_common(wish: SamplingRequest) -> _Json:
    return ({"model": wish.model} if wish.model else {}) | ({"cache_salt": wish.salt} if wish.salt else {})


def _generate_body(wish: SamplingRequest) -> _Json:
    fields = _vllm_fields(wish) | {"detokenize": False}
    return {"token_ids": wish.ids.tolist(), "sampling_params": fields, **_vllm_common(wish)}


def _completions_body(wish: SamplingRequest) -> _Json:
    fields = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    return {"prompt": wish.ids.tolist(), **_vllm_fields(wish), **fields, **_vllm_common(wish)}


def _sglang_body(wish: SamplingRequest) -> _Json:
    # ignore_eos would switch off stop_token_ids too, so the model's own end of sequence always ends a continuation.
    fields = _sampling_fields(wish) | {"max_new_tokens": wish.max_tokens}
    ids = wish.ids.tolist()
    body: _Json = {"input_ids": ids, "sampling_params": fields | {"n": wish.count}}
    if wish.seed is not None:
        # With n, all continuations would get the same seed, and be equal under --enable-deterministic-inference.
        seeds = [fields | {"sampling_seed": wish.seed + number} for number in range(wish.count)]
        body = {"input_ids": [ids] * wish.count, "sampling_params": seeds}
    body |= {"return_logprob": True, "top_logprobs_num": wish.alternatives}
    # vLLM decides at its start if it returns experts, so its requests have no field for it.
    body |= {"return_routed_experts": True} if wish.routes else {}
    return body | ({"extra_key": wish.salt} if wish.salt else {})


def _segment(tokens: Any, logprobs: Any, finish: Any, version: str, cached: Any) -> Segment:
    array = checked_ids(tokens)
    if not isinstance(finish, str):
        raise TypeError("a finish reason that is not a text")
    # numpy would take texts and booleans for numbers.
    are_numbers = set(map(type, logprobs)) <= {int, float}
    if finish == ABORT and not are_numbers:
        logprobs = []
    values = np.array(logprobs, np.float32)
    is_possible = (values > _NO_LOGPROB) & (values <= _LARGEST_LOGPROB)
    if finish != ABORT and not (are_numbers and array.shape == values.shape and is_possible.all()):
        raise ValueError("not one log-probability for each token")
    return Segment(array, values, finish, version, None if cached is None else int(cached))


def checked_ids(tokens: Any) -> Int32:
    """Return token ids of a JSON value as int32 [n].

    Raises:
        TypeError, ValueError, OverflowError: it is not a list of integers from 0 to 2^31 - 1.
    """
    # numpy would take the texts, fractions and booleans of ["1", 3.7, true] for 1, 3 and 1.
    if not isinstance(tokens, list) or not set(map(type, tokens)) <= {int}:
        raise TypeError("token ids that are not integers")
    array = np.array(tokens, np.int64)
    if array.size and not 0 <= array.min() <= array.max() <= _LARGEST_ID:
        raise ValueError("token ids below 0 or above 2^31 - 1")
    return array.astype(np.int32)


def _version(spans: Any) -> str:
    """Return the names of the policies that sampled a continuation, such as "7" or "7,8"."""
    names = [str(span["version"]) for span in spans or ()]
    # Servers call the weights "default" until an update gives them a name.
    return ",".join(name for name in dict.fromkeys(names) if name != "default")


def _vllm_cached(answer: Any) -> int | None:
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    cached: int | None = details.get("cached_tokens")
    return cached


def _vllm_num_prompt(answer: Any) -> int | None:
    number: int | None = (answer.get("usage") or {}).get("prompt_tokens")
    return number


def _generate_segments(answer: Any) -> list[Segment]:
    segments = []
    for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
        content = (choice["logprobs"] or {}).get("content") or []
        if [entry["token_id"] for entry in content] != list(choice["token_ids"]):
            raise ValueError("log-probabilities of other tokens")
        logprobs = [entry["logprob"] for entry in content]
        version = _version(choice.get("weight_versions"))
        segments.append(_segment(choice["token_ids"], logprobs, choice["finish_reason"], version, _vllm_cached(answer)))
    return segments


def _completions_segments(answer: Any) -> list[Segment]:
    segments = []
    for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
        logprobs = (choice["logprobs"] or {}).get("token_logprobs") or []
        version = _version(choice.get("weight_versions"))
        segments.append(_segment(choice["token_ids"], logprobs, choice["finish_reason"], version, _vllm_cached(answer)))
    return segments


def _sglang_answers(answer: Any) -> list[Any]:
    return answer if isinstance(answer, list) else [answer]


def _sglang_segments(answer: Any) -> list[Segment]:
    segments = []
    for choice in _sglang_answers(answer):
        meta = choice["meta_info"]
        tokens, logprobs = choice["output_ids"], meta["output_token_logprobs"]
        if [entry[1] for entry in logprobs] != list(tokens):
            raise ValueError("log-probabilities of other tokens")
        spans = meta.get("weight_versions") or [{"version": meta.get("weight_version") or "default"}]
        finish = meta["finish_reason"]["type"]
        values = [entry[0] for entry in logprobs]
        segments.append(_segment(tokens, values, finish, _version(spans), meta.get("cached_tokens")))
    return segments


def _sglang_num_prompt(answer: Any) -> int | None:
    number: int | None = _sglang_answers(answer)[0]["meta_info"].get("prompt_tokens")
    return number


def _vllm_routes(answer: Any) -> list[Any]:
    return [choice.get("routed_experts") for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]


def _sglang_routes(answer: Any) -> list[Any]:
    return [choice["meta_info"].get("routed_experts") for choice in _sglang_answers(answer)]


def _generate_first(answer: Any) -> dict[int, float]:
    likely = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return {entry["token_id"]: entry["logprob"] for entry in likely}


def _completions_first(answer: Any) -> dict[int, float]:
    likely = answer["choices"][0]["logprobs"]["top_logprobs"][0]
    # {"token_id:187": -7.0} -> {187: -7.0}
    return {int(name.removeprefix("token_id:")): value for name, value in likely.items()}


def _sglang_first(answer: Any) -> dict[int, float]:
    likely = _sglang_answers(answer)[0]["meta_info"]["output_top_logprobs"][0]
    return {entry[1]: entry[0] for entry in likely}


# In the order of the attempts. SGLang has /v1/completions too, so SGLang's API is tried before it.
_VLLM = (_vllm_num_prompt, _vllm_routes)
DIALECTS = (
    ServerDialect("vLLM", "/inference/v1/generate", _generate_body, _generate_segments, _generate_first, *_VLLM),
    ServerDialect(
        "SGLang", "/generate", _sglang_body, _sglang_segments, _sglang_first, _sglang_num_prompt, _sglang_routes
    ),
    ServerDialect("vLLM", "/v1/completions", _completions_body, _completions_segments, _completions_first, *_VLLM),
)

UNREADABLE = (KeyError, TypeError, IndexError, ValueError, AttributeError, ArithmeticError)


def read_continuations(dialect: ServerDialect, answer: Any, *, url: str) -> list[Segment]:
    """Return the continuations of an `answer`.

    Raises:
        EngineError: the answer has no token ids, or log-probabilities that do not fit.
    """
    try:
        return dialect.segments(answer)
    except UNREADABLE as error:
        raise EngineError(
            f"{url}: {dialect.path} answered without token ids and one log-probability for each ({_reason(error)}); "
            "use vLLM from 0.10.2 on, or SGLang"
        ) from error


def read_answer_part(reader: Callable[[Any], _T], dialect: ServerDialect, answer: Any, name: str, *, url: str) -> _T:
    """Return `reader(answer)`, another part of an answer than its continuations.

    Raises:
        EngineError: the answer has another form; the message contains the `name` of the part.
    """
    try:
        return reader(answer)
    except UNREADABLE as error:
        raise EngineError(
            f"{url}: {dialect.path} answered {name} in another form ({_reason(error)}); use vLLM from 0.10.2 on, or "
            "SGLang"
        ) from error


def _reason(error: Exception) -> str:
    text = repr(error)  # may contain a whole field of the answer
    return text if len(text) <= 200 else text[:197] + "..."
