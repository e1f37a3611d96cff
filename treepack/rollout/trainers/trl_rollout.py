"""Tree sampling inside TRL's GRPOTrainer, through its `rollout_func`; made for trl 1.16.

    GRPOTrainer                                         the function that `tree_rollouts` returns
    weights to the server of vLLM
    prompts of a process, each num_generations times    --> one tree of num_generations leaves per prompt
    rewards, advantages, loss                           <-- prompt_ids, completion_ids, logprobs, env_mask,
    reward functions                                    <-- tree, segments, leaf_weight, finish, ... of each leaf

TRL gives the function the prompts of its process as its sampler repeats them, and expects one completion for each, in
their order. A tree is sampled in one process, so the copies of a prompt must not be divided among processes.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from treepack.errors import TreepackError
from treepack.rollout.engine import Engine
from treepack.rollout.environment import EnvironmentFactory
from treepack.rollout.options import Sampling, TreeOptions
from treepack.rollout.query import Query
from treepack.rollout.requests import LimitedEngine, all_or_none
from treepack.rollout.trainers.sampled_leaves import SampledLeaf, TrainerWorld, check_width, read_leaves, sample_query
from treepack.rollout.tree import Tree

_Result = TypeVar("_Result")
_EngineOf = Callable[[Any], Engine | Awaitable[Engine]]
_Reward = Callable[..., Sequence[float | None]]

_ATTEMPTS = 5  # of a request; the pauses between them are 0.5, 1, 2 and 4 seconds
_TIMEOUT = 3600.0  # seconds of an attempt: a server answers late when many trees wait for it


def tree_rollouts(
    options: TreeOptions,
    *,
    engine: Engine | _EngineOf | None = None,
    environment: EnvironmentFactory | None = None,
    seed: int = 0,
    max_requests: int = 256,
) -> _TreeRollouts:
    """Return a `rollout_func` for GRPOTrainer that samples a tree of num_generations leaves for each prompt.

    The width of `options` is replaced by the trainer's num_generations, or num_generations_eval in an evaluation; its
    max_tokens is at most the trainer's max_completion_length. Every reward function of the trainer gets the fields of
    `SampledLeaf` as lists of one value per completion, and `tree`, which numbers the trees of a call from 0.

    Args:
        options: the shape of a tree, which must always reach its width: with a fallback, or first_forks=None.
        engine: an engine, or a function that makes one from the trainer at the first call. By default the trainer's own
            server of vLLM. The version that is announced to it is the trainer's global step.
        environment: makes the environment of a prompt from {"prompt": the prompt} and the tokenizer, for rollouts of
            several turns; see docs/environments.md. The reward function `environment_reward` returns its rewards.
        seed: of all choices and requests.
        max_requests: requests to the engine at the same time.

    Raises:
        TreepackError: by the function, for settings of the trainer that no tree can be sampled with, and if sampling
            fails.
    """
    return _TreeRollouts(options, engine, environment, seed, max_requests)


def environment_reward(environment_reward: list[float | None], **_: Any) -> list[float | None]:
    """Return the rewards of the environments; a reward function for GRPOTrainer."""
    return environment_reward


def leaf_weighted(reward: _Reward, *, fallback_leaves: bool = False) -> _Reward:
    """Return a reward function whose advantages in GRPOTrainer are weighted by the leaf weights of `tree_rollouts`.

    GRPO's advantage is the reward less the plain mean of its group. On a tree this mean is biased towards long paths,
    and so is the sum of gradients. The function returns n w (r - b) for n leaves of a tree with rewards r and weights
    w. The baseline b of a leaf is the weighted mean over the leaves below the other first forks. They share no token
    with it, so b is independent of it and the sum of gradients has no bias. The mean of the values is 0, so TRL takes
    them as advantages unchanged if scale_rewards="none". The metric NAME/weighted_mean is the mean reward that
    independent rollouts have, estimated without bias.

    A tree with one first fork gets the weighted mean over all its leaves, which takes the gradient of the tokens that
    they share. If a trainer has several reward functions, each of them must be weighted.

    Args:
        reward: a synchronous reward function of TRL; None leaves a completion out, whose weight goes to the others.
        fallback_leaves: also train leaves that a fallback added, by weights that leave a rest of bias. By default the
            weights are those before the first fallback, and these leaves have the advantage 0.

    Raises:
        TreepackError: `reward` is a coroutine function.
    """
    if inspect.iscoroutinefunction(reward):
        raise TreepackError(f"leaf_weighted: {reward.__name__} is asynchronous; pass a plain function")
    column = "leaf_weight" if fallback_leaves else "leaf_weight_before_fallback"

    @functools.wraps(reward)
    def weighted(**columns: Any) -> list[float | None]:
        rewards = np.array([np.nan if value is None else value for value in reward(**columns)], np.float64)
        is_scored = ~np.isnan(rewards)
        weights = np.where(is_scored, np.array(columns[column]), 0.0)
        forks = np.array([ids[0] for ids in columns["segment_ids"]])  # the first segment of each leaf
        advantages, means = np.zeros(len(rewards)), []
        for tree in np.unique(columns["tree"]):
            leaves = np.flatnonzero((np.array(columns["tree"]) == tree) & (weights > 0))
            if len(leaves) == 0:
                continue
            size, shares = columns["tree"].count(tree), weights[leaves] / weights[leaves].sum()
            means.append(float(shares @ rewards[leaves]))
            others = forks[leaves, None] != forks[leaves]
            # others [leaf, leaf]: the baseline of a row is the mean over its columns.
            baselines = others @ (shares * rewards[leaves]) / (others @ shares) if others.any() else means[-1]
            advantages[leaves] = size * shares * (rewards[leaves] - baselines)
        if means:
            columns["log_metric"](f"{getattr(reward, '__name__', 'reward')}/weighted_mean", float(np.mean(means)))
        return [float(value) if scored else None for value, scored in zip(advantages, is_scored, strict=True)]

    return weighted


def trainer_sampling(trainer: Any) -> Sampling:
    """Return the distribution of a trainer's own generation; engines that replace it sample from it.

    Raises:
        TreepackError: the trainer changes the distribution in a way that engines do not have.
    """
    others = {
        "min_p": (trainer.min_p, (None, 0.0)),
        "repetition_penalty": (trainer.repetition_penalty, (None, 1.0)),
        "generation_kwargs": (trainer.args.generation_kwargs, (None, {})),
    }
    for name, (value, unused) in others.items():
        if value not in unused:
            raise TreepackError(f"tree_rollouts: {name} is {value}, which tree sampling does not have; leave it out")
    return Sampling(
        temperature=trainer.temperature,
        top_p=trainer.top_p,
        # TRL writes "all tokens" as 0, and older configurations as None or -1.
        top_k=max(trainer.top_k or 0, 0),
        stop_token_ids=tuple(trainer.eos_token_ids),
    )


class _TreeRollouts:
    """A `rollout_func` for GRPOTrainer; see `tree_rollouts`."""

    def __init__(
        self,
        options: TreeOptions,
        engine: Engine | _EngineOf | None,
        environment: EnvironmentFactory | None,
        seed: int,
        max_requests: int,
    ) -> None:
        self.options = options
        self.environment = environment
        self.seed = seed
        self.max_requests = max_requests
        self._source = engine
        self._engine: Engine | None = None
        self._version: str | None = None
        self._num_calls = 0
        self._thread: _LoopThread | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Return the completions of `prompts` in their order, as TRL expects them."""
        is_training = trainer.model.training
        name = "num_generations" if is_training else "num_generations_eval"
        count: int = getattr(trainer, name)
        longest = min(self.options.max_tokens, trainer.max_completion_length)
        options = replace(self.options, width=count, max_tokens=longest)
        check_width(options, caller="tree_rollouts", name=name)
        _check_copies(prompts, count, name)
        # The main process returns from the exchange of weights last; until then a server has the old ones.
        trainer.accelerator.wait_for_everyone()
        queries = self._queries(prompts[::count], trainer)
        self._thread = self._thread or _LoopThread()
        trees = self._thread.run(self._sample(queries, options, trainer))
        return _columns(trees, with_rewards=self.environment is not None)

    def close(self) -> None:
        """Close the engine after the last training and evaluation; a local engine keeps the process alive."""
        if self._engine is not None and self._thread is not None:
            self._thread.run(self._engine.close())
            self._engine = None

    def _queries(self, prompts: list[Any], trainer: Any) -> list[Query]:
        ids, images, _ = trainer._tokenize_prompts(prompts)
        if images is not None:
            raise TreepackError("tree_rollouts: the prompts have images; trees are sampled from text only")
        # A process generates several times at the same step, for accumulated gradients and for evaluations.
        call = f"step {trainer.state.global_step} process {trainer.accelerator.process_index} call {self._num_calls}"
        self._num_calls += 1
        keys = [f"{call} prompt {i}" for i in range(len(ids))]
        return [
            Query(key, key, np.array(each, np.int32), fields={"prompt": prompt}, source="tree_rollouts")
            for key, each, prompt in zip(keys, ids, prompts, strict=True)
        ]

    async def _sample(self, queries: list[Query], options: TreeOptions, trainer: Any) -> list[Tree]:
        if self._engine is None:
            self._engine = await _open(self._source, trainer)
        version = str(trainer.state.global_step)
        if version != self._version:
            await self._engine.publish(version)
            self._version = version
        engine = LimitedEngine(self._engine, max_requests=self.max_requests, attempts=_ATTEMPTS, timeout=_TIMEOUT)

        world = TrainerWorld(self.environment, trainer.processing_class, self.seed)
        return await all_or_none(sample_query(query, engine, options, world) for query in queries)


def _check_copies(prompts: list[Any], count: int, name: str) -> None:
    """Check that `prompts` are `count` copies each, next to each other.

    Raises:
        TreepackError: the copies of a prompt are in several processes.
    """
    # [a a b b] with 2 copies; a process of two has [a a b] and [b c c] if its batch is 3.
    if len(prompts) % count or any(prompt != prompts[i - i % count] for i, prompt in enumerate(prompts)):
        sizes = "per_device_train_batch_size * steps_per_generation"
        sizes = sizes if name == "num_generations" else "per_device_eval_batch_size"
        raise TreepackError(
            f"tree_rollouts: a process has {len(prompts)} prompts that are not {count} copies each, but one process "
            f"samples a tree; make {sizes} a multiple of {name}"
        )


async def _open(source: Engine | _EngineOf | None, trainer: Any) -> Engine:
    """Return the engine that the caller named.

    Raises:
        TreepackError: there is none, or it samples at another temperature.
    """
    made = await _connect(trainer) if source is None else source(trainer) if callable(source) else source
    engine = await made if inspect.isawaitable(made) else made
    if engine.sampling.temperature != trainer.temperature:
        raise TreepackError(
            f"tree_rollouts: the engine samples at temperature {engine.sampling.temperature} and the trainer has "
            f"{trainer.temperature}; make the engine with trainer_sampling(trainer)"
        )
    return engine


async def _connect(trainer: Any) -> Engine:
    if not trainer.use_vllm or trainer.vllm_mode != "server":
        raise TreepackError(
            "tree_rollouts: the trainer has no server of vLLM; set use_vllm=True and vllm_mode='server', or pass "
            "engine=..."
        )
    from treepack.rollout.servers.server import connect

    server = trainer.vllm_generation
    url = server.server_base_url or f"http://{server.server_host}:{server.server_port}"
    engine: Engine = await connect(url, trainer_sampling(trainer))
    return engine


def _columns(trees: list[Tree], *, with_rewards: bool) -> dict[str, Any]:
    """Return the leaves of all trees as columns of one value per completion."""
    leaves: list[tuple[int, Tree, SampledLeaf]] = [
        (i, tree, leaf) for i, tree in enumerate(trees) for leaf in read_leaves(tree)
    ]
    has_logprobs = all(leaf.logprobs is not None for _, _, leaf in leaves)
    return {
        "prompt_ids": [tree.query.prompt.tolist() for _, tree, _ in leaves],
        "completion_ids": [leaf.response for _, _, leaf in leaves],
        "logprobs": [leaf.logprobs for _, _, leaf in leaves] if has_logprobs else None,
        "env_mask": [leaf.mask for _, _, leaf in leaves],
        "tree": [i for i, _, _ in leaves],
        **({"environment_reward": [leaf.reward for _, _, leaf in leaves]} if with_rewards else {}),
        **{name: [leaf.fields[name] for _, _, leaf in leaves] for name in leaves[0][2].fields},
    }


class _LoopThread:
    """An event loop in a separate thread: TRL's loop is not asynchronous, and a notebook has a loop already.

    It is the same loop for all calls, because connections belong to the loop that opened them.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="treepack-rollouts", daemon=True).start()

    def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Return the result of `coroutine`, and cancel it if the wait is interrupted."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
