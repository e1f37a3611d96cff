"""An engine in this process: transformers' continuous batching, on the CPU or on a GPU.

    model --twin--> the same weights under transformers' own attention --manager, in a thread--> Segments

    extend: one request for each continuation. The first one computes the keys of the prompt; the others start when they
            are in the cache, and share them.

Keys are cached in pages of `page_size` tokens. Requests share full pages whose tokens are equal from the first one on,
so the next segment of a path computes only the tokens of its prompt after the last full page.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treepack.errors import TreepackError
from treepack.rollout.engine import LENGTH, STOP, EngineError, Segment
from treepack.rollout.in_process.local_model import LocalOptions as LocalOptions
from treepack.rollout.in_process.local_model import check_transformers, failure, manager_settings, twin
from treepack.rollout.in_process.local_sampling import SampledContinuation, TokenChoice
from treepack.rollout.options import Sampling
from treepack.trajectory import Int32


def load_engine(
    name: str | Path,
    sampling: Sampling,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
    options: LocalOptions = LocalOptions(),  # noqa: B008 (immutable)
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
    from treepack.model.adapters.adapter import base_of
    from treepack.model.load import build_model, hide_progress_bars, load_merged, read_config, translate_load_errors

    base, adapter = base_of(name, None)
    if adapter is None:
        config, _ = read_config(base)
        with translate_load_errors(base), hide_progress_bars():
            model = build_model(base, config, dtype, seed)
    else:
        model = load_merged(base, str(name), seed=seed)
        # Not `model.to(dtype)`, which would round the frequencies of rotary positions, too.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    return LocalEngine(model.to(device), sampling, options=options)


def default_stop_tokens(name: str | Path) -> tuple[int, ...]:
    """Return the token ids that end a response by the model's generation config, or by its config, ascending.

    Raises:
        TreepackError: the model has no config that can be read.
    """
    from transformers import GenerationConfig

    from treepack.files.model_source import local_source
    from treepack.files.remote.hub import is_offline
    from treepack.model.adapters.adapter import base_of
    from treepack.model.load import read_config

    base, _ = base_of(name, None)
    local = local_source(base)
    stop = None
    if not local.endswith(".json"):
        with contextlib.suppress(OSError):  # few models lack the file, and then their config has the ids
            stop = GenerationConfig.from_pretrained(local, local_files_only=is_offline(local)).eos_token_id
    if stop is None:
        stop = read_config(base)[0].get_text_config().eos_token_id
    return tuple(sorted({stop} if isinstance(stop, int) else set(stop or ())))


class LocalEngine:
    """Samples from a model in memory, in a separate thread.

    The engine runs a twin of the model: the same parameters, in place, under transformers' attention and without
    dropout. So the model itself may be trained with another attention between the calls. After its weights have
    changed in place, await `publish` before the next call.

    A continuation is a function of its ids, `seed` and its number, whatever else is in the batch, except for rounding:
    matrix products of other batch sizes differ in the last bits, which changes a token once in many thousands.
    Log-probabilities belong to the distribution that was sampled from, after temperature, top_p and top_k.

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
        options: LocalOptions = LocalOptions(),  # noqa: B008 (immutable)
        version: str = "",
    ) -> None:
        check_transformers()
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
                "take stop tokens of its own tokenizer"
            )
        self._numbers = itertools.count()
        self._calls: set[asyncio.Future[Any]] = set()
        self._publishing: asyncio.Event | None = None
        self._manager: Any = None
        self._choice = TokenChoice(sampling)
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
            EngineError: token ids outside its vocabulary, a sequence longer than the model or the cache takes, or the
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
            choice.continuations[name] = SampledContinuation(
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
                manager.output_router.deliver(failure(name, str(fault)))

        return start

    def _segments(self, results: list[Any], names: list[str], num_prompt: int, version: str) -> list[Segment]:
        errors = [result.error for result in results if result is not None and result.error is not None]
        if errors:
            raise EngineError(f"transformers' continuous batching failed ({errors[0]}); start the engine again")
        # The other continuations found the results of the first one, which no cache saved.
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

        # Without sampling: `TokenChoice` draws the tokens, and the manager takes the maximum of the scores that it
        # returns.
        generation = GenerationConfig(do_sample=False, eos_token_id=-1)
        self._choice = TokenChoice(self._sampling)
        device = self._model.device
        if device.type == "cuda":
            # The manager computes on a separate stream, which does not wait for the stream that writes the weights.
            torch.cuda.synchronize(device)
        try:
            manager = self._model.init_continuous_batching(generation, manager_settings(self._options, device.type))
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
