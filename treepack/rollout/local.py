"""An engine in this process: transformers' continuous batching, on the CPU or on a GPU.

    model --twin--> the same weights under transformers' own attention --manager, in a thread--> Segments

    extend: one request for each continuation. The first one computes the keys of the prompt; the others start when they
            are in the cache, and share them.

Keys are cached in pages of `page_size` tokens. Requests share full pages whose tokens are equal from the first one on,
so the next segment of a path computes only what its prompt has after the last full page.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packaging.version import Version

from treepack.errors import TreepackError
from treepack.rollout import local_attention
from treepack.rollout.engine import LENGTH, STOP, EngineError, Sampling, Segment
from treepack.rollout.local_sampling import Choice, Continuation
from treepack.trajectory import Int32

OLDEST_TRANSFORMERS = "5.17"
CPU_CACHE_TOKENS = 32768  # a cache of the default size would take nine tenths of the machine's memory
CPU_BATCH_TOKENS = 512


@dataclasses.dataclass(frozen=True, slots=True)
class LocalOptions:
    """Memory of a local engine.

    Attributes:
        page_size: tokens of a page of the cache; prompts share only full pages.
        cache_tokens: tokens whose keys and values fit in the cache, of all requests together. None takes
            `memory_share` of the GPU, or `CPU_CACHE_TOKENS`.
        memory_share: share of the free memory of the GPU for the cache and what the manager needs beside it.

    Raises:
        TreepackError: a value that makes no sense, by its name.
    """

    page_size: int = 16
    cache_tokens: int | None = None
    memory_share: float = 0.8

    def __post_init__(self) -> None:
        """Refuse values that make no sense, naming the option."""
        if self.page_size < 4:
            raise TreepackError(f"page_size is {self.page_size}; expected at least 4 tokens")
        if self.cache_tokens is not None and self.cache_tokens < self.page_size:
            raise TreepackError(f"cache_tokens is {self.cache_tokens}; expected at least a page of {self.page_size}")
        if not 0 < self.memory_share <= 1:
            raise TreepackError(f"memory_share is {self.memory_share}; expected a share above 0 and at most 1")


def load_engine(
    name: str | Path,
    sampling: Sampling,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
    options: LocalOptions = LocalOptions(),
) -> LocalEngine:
    """Load a model and return an engine that samples from it.

    Args:
        name: a model directory or its address, a hub name, or a config file ending in .json, which gets random weights
            from `seed`. An adapter of PEFT is merged into its base.
        sampling: the distribution to sample from; see `default_stop_tokens`.
        dtype: dtype of the weights.
        device: device of the weights.
        seed: seed of random weights.
        options: memory of the engine.

    Raises:
        TreepackError: the model cannot be loaded, or transformers cannot batch it.
    """
    from treepack.model.adapter import base_of
    from treepack.model.load import build_model, hide_progress_bars, load_merged, read_config, translate_load_errors

    base, adapter = base_of(name, None)
    if adapter is None:
        config, _ = read_config(base)
        with translate_load_errors(base), hide_progress_bars():
            model = build_model(base, config, dtype, seed)
    else:
        model = load_merged(base, str(name), seed=seed)
    return LocalEngine(model.to(device=device, dtype=dtype), sampling, options=options)


def default_stop_tokens(name: str | Path) -> tuple[int, ...]:
    """Return the token ids that end a response by the model's generation config, or by its config, ascending.

    Raises:
        TreepackError: the model has no config that can be read.
    """
    from transformers import GenerationConfig

    from treepack.files.hub import is_offline
    from treepack.model.adapter import base_of
    from treepack.model.load import read_config
    from treepack.model.source import local_source

    base, _ = base_of(name, None)
    local = local_source(base)
    stop = None
    if not local.endswith(".json"):
        with contextlib.suppress(OSError):  # few models lack the file, and then their config has the ids
            stop = GenerationConfig.from_pretrained(local, local_files_only=is_offline(local)).eos_token_id
    if stop is None:
        stop = read_config(base)[0].eos_token_id
    return tuple(sorted({stop} if isinstance(stop, int) else set(stop or ())))


class LocalEngine:
    """Samples from a model in memory, in a thread of its own.

    The engine runs a twin of the model: the same parameters, in place, under transformers' attention and without
    dropout. So the model itself may be trained with another attention between the calls. After its weights have
    changed in place, await `publish` before the next call.

    A continuation is a function of its ids, `seed` and its number, whatever else is in the batch, except for rounding:
    matrix products of other batch sizes differ in the last bits, which changes a token once in many thousands.
    Log-probabilities are those of the distribution that was sampled from, after temperature, top_p and top_k.

    Close the engine: its thread keeps the process alive.

    Args:
        model: a causal language model of transformers whose weights are whole on one device.
        sampling: the distribution to sample from.
        options: memory of the engine.
        version: name of the policy until the first `publish`.

    Raises:
        TreepackError: transformers is too old, or cannot batch the model; the message gives the reason.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        sampling: Sampling,
        *,
        options: LocalOptions = LocalOptions(),
        version: str = "",
    ) -> None:
        _check_transformers()
        self._sampling = sampling
        self._options = options
        self._version = version
        self._model = twin(model)
        config = self._model.config.get_text_config()
        self._vocab_size = int(config.vocab_size)
        self._longest = int(getattr(config, "max_position_embeddings", None) or 2**31)
        if any(token >= self._vocab_size for token in sampling.stop_token_ids):
            raise TreepackError(
                f"stop_token_ids are {list(sampling.stop_token_ids)} and the model has {self._vocab_size} tokens; "
                "take those of its own tokenizer"
            )
        self._numbers = itertools.count()
        self._calls: set[asyncio.Future[Any]] = set()
        self._publishing: asyncio.Event | None = None
        self._manager: Any = None
        self._choice = Choice(sampling)
        self._start()

    @property
    def sampling(self) -> Sampling:
        """The distribution that every call samples from."""
        return self._sampling

    @property
    def num_steps(self) -> int:
        """Forward passes since the start or the last `publish`."""
        return int(getattr(self._manager, "current_batch", 0))

    async def extend(self, ids: Int32, *, count: int, max_tokens: int, seed: int) -> list[Segment]:
        """Continue `ids` int32 [n] `count` times, by 1 to `max_tokens` tokens each.

        Raises:
            EngineError: token ids of another tokenizer, a sequence longer than the model or the cache takes, or the
                engine was closed or failed.
        """
        self._check(ids, max_tokens)
        while self._publishing is not None:
            await self._publishing.wait()
        call = f"{next(self._numbers)}"
        names = [f"{call}.{number}" for number in range(count)]
        manager, choice, version = self._manager, self._choice, self._version
        done: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        results: dict[str, Any] = {}

        def finished(result: Any) -> None:
            results[result.request_id] = result
            if not done.done() and (len(results) == count or result.error is not None):
                done.set_result(results)

        tokens = ids.tolist()
        # Requests that start together would all compute the same prompt. Those after the first start in the step after
        # its first token, when all full pages of the prompt are in the cache. A prompt below a page has none.
        starts = [self._request(name, tokens, max_tokens, finished) for name in names]
        waits = len(tokens) > self._options.page_size
        later = starts[1:] if waits else []
        for number, name in enumerate(names):
            choice.continuations[name] = Continuation(
                seed=seed,
                number=number,
                max_tokens=max_tokens,
                at_first_token=partial(_call_all, later) if number == 0 and later else None,
            )
        self._calls.add(done)
        try:
            for start in starts[:1] if waits else starts:
                start()
            await done
            return self._segments([results.get(name) for name in names], names, len(tokens), version)
        finally:
            self._calls.discard(done)
            for name in names:
                del choice.continuations[name]
                if name not in results:
                    manager.output_router.result_handlers.pop(name, None)
                    manager.cancel_request(name)

    def _check(self, ids: Int32, max_tokens: int) -> None:
        if self._manager is None:
            raise EngineError("the engine was closed; start another one")
        if not len(ids):
            raise EngineError("a prompt has no tokens; expected at least one token id to continue")
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size:
            raise EngineError(
                f"a prompt contains the token id {int(ids.max())} and the model has {self._vocab_size} tokens; "
                "tokenize the prompts with the tokenizer of this model"
            )
        total = len(ids) + max_tokens
        if total > self._longest:
            raise EngineError(
                f"a prompt of {len(ids)} tokens and {max_tokens} more exceed the {self._longest} positions of the "
                "model; shorten the prompt, or lower --max-tokens"
            )
        if total > self._capacity:
            raise EngineError(
                f"a prompt of {len(ids)} tokens and {max_tokens} more exceed the cache of {self._capacity} tokens; "
                "give the engine more cache_tokens, or lower --max-tokens"
            )

    def _request(self, name: str, tokens: list[int], max_tokens: int, finished: Callable[[Any], None]) -> Any:
        """Return a function that sends the request `name`; any thread may call it."""
        manager = self._manager
        manager.register_result_handler(name, finished)
        stop = list(self._sampling.stop_token_ids) or -1

        def start() -> None:
            if manager.add_request(tokens, request_id=name, max_new_tokens=max_tokens, eos_token_id=stop) is None:
                fault = manager.background_thread_status.fatal_error or "it was closed"
                manager.output_router.deliver(_failure(name, str(fault)))

        return start

    def _segments(self, results: list[Any], names: list[str], num_prompt: int, version: str) -> list[Segment]:
        errors = [result.error for result in results if result is not None and result.error is not None]
        if errors:
            raise EngineError(f"transformers' continuous batching failed ({errors[0]}); start the engine again")
        # The other continuations found what the first one computed, which no cache saved.
        num_cached = num_prompt - min(num_prompt, self._choice.continuations[names[0]].num_computed)
        segments = []
        for result, name in zip(results, names, strict=True):
            tokens = np.array(result.generated_tokens, np.int32)
            logprobs = np.array(self._choice.continuations[name].logprobs, np.float32)
            assert len(logprobs) == len(tokens)
            finish = STOP if int(tokens[-1]) in self._sampling.stop_token_ids else LENGTH
            segments.append(Segment(tokens, logprobs, finish, version, num_cached))
        return segments

    async def publish(self, version: str) -> None:
        """Announce that the weights have changed: wait for the calls under way, then drop all cached keys.

        Raises:
            EngineError: the engine was closed.
        """
        if self._manager is None:
            raise EngineError("the engine was closed; start another one")
        while self._publishing is not None:
            await self._publishing.wait()
        self._publishing = asyncio.Event()
        try:
            if self._calls:
                await asyncio.wait(self._calls)
            # The pages of a new manager are empty; the manager of transformers cannot drop only its hashes.
            self._stop()
            self._start()
            self._version = version
        finally:
            self._publishing.set()
            self._publishing = None

    async def close(self) -> None:
        """Stop the thread and free the cache; calls under way fail."""
        if self._manager is None:
            return
        for call in list(self._calls):
            if not call.done():
                call.set_exception(EngineError("the engine was closed while it answered; start another one"))
        self._stop()
        self._manager = None

    def _start(self) -> None:
        """Start a manager with an empty cache; the random state of the process stays as it was."""
        from transformers import GenerationConfig

        # Without sampling, because `Choice` draws, and the manager takes the maximum of what it returns.
        generation = GenerationConfig(do_sample=False, eos_token_id=-1)
        self._choice = Choice(self._sampling)
        device = self._model.device
        try:
            manager = self._model.init_continuous_batching(generation, _settings(self._options, device.type))
            manager.logit_processor = self._choice
            # Starting seeds torch's generators.
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                manager.warmup()
        except (ValueError, KeyError, NotImplementedError, RuntimeError) as error:
            raise TreepackError(
                f"{type(self._model).__name__}: transformers cannot batch it ({error}); sample from a server"
            ) from error
        settings = manager.continuous_batching_config
        self._capacity = settings.num_blocks * self._options.page_size
        manager.start()
        self._manager = manager

    def _stop(self) -> None:
        self._manager.stop(block=True, hard_stop=True)
        self._manager.destroy()


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()


def twin(model: Any) -> Any:
    """Return a model with the parameters and buffers of `model`, not copies, under transformers' attention.

    Raises:
        TreepackError: its parameters are not those of its class, as with adapters, or not whole.
    """
    config = copy.deepcopy(model.config)
    with torch.device("meta"):
        other = type(model)._from_config(config, attn_implementation=_attention(), dtype=model.dtype)
    if local_attention.takes(config.get_text_config(), model.device, model.dtype):
        local_attention.register()
        prefix = "paged|" if "paged|" in _attention() else ""
        # Not by the model's own method, which looks for a package of every name with "flash".
        other.config.get_text_config()._attn_implementation = prefix + local_attention.NAME
    for kind in ("parameters", "buffers"):
        theirs = dict(getattr(model, f"named_{kind}")(remove_duplicate=False))
        ours = dict(getattr(other, f"named_{kind}")(remove_duplicate=False))
        if theirs.keys() != ours.keys() or any(theirs[name].shape != ours[name].shape for name in ours):
            raise TreepackError(
                f"{type(model).__name__}: its {kind} are not those of its class; sample from a model with whole "
                "weights on one device, with adapters merged into them"
            )
        for name, tensor in theirs.items():
            owner, _, leaf = name.rpartition(".")
            getattr(other.get_submodule(owner), f"_{kind}")[leaf] = tensor
    return other.eval()


def _check_transformers() -> None:
    import transformers

    if Version(transformers.__version__) < Version(OLDEST_TRANSFORMERS):
        raise TreepackError(
            f"the local engine needs transformers {OLDEST_TRANSFORMERS} and this is {transformers.__version__}; "
            "upgrade it, or sample from a server"
        )


def _attention() -> str:
    # Older versions had implementations of their own for pages.
    return "sdpa" if "auto_switch_to_flash" in _known_settings() else "paged|sdpa"


def _known_settings() -> set[str]:
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    return {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}


def _settings(options: LocalOptions, device_type: str) -> Any:
    """Return the manager's settings: step by step and without graphs, because `Choice` is Python code in each step."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    known = _known_settings()
    tokens, batch = options.cache_tokens, None
    if device_type == "cpu":
        tokens, batch = tokens or CPU_CACHE_TOKENS, CPU_BATCH_TOKENS
    settings: dict[str, Any] = {
        # The page's tokens have another name in older versions.
        "page_size" if "page_size" in known else "block_size": options.page_size,
        "num_blocks": None if tokens is None else -(-tokens // options.page_size),
        "max_batch_tokens": batch,
        "max_memory_percent": options.memory_share,
        "use_cuda_graph": False,
        "use_async_batching": False,
        "max_blocks_per_request": 0,
        "auto_switch_to_flash": False,
    }
    return ContinuousBatchingConfig(**{name: value for name, value in settings.items() if name in known})


def _failure(name: str, error: str) -> Any:
    from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

    return GenerationOutput(request_id=name, error=error, status=RequestStatus.FAILED)
