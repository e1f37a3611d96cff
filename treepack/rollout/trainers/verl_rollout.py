"""Tree sampling inside verl 0.9, as an agent loop.

    verl                                                        here
    n calls of AgentLoop.run with one uid            -->        one tree of n leaves; call i returns leaf i
    server_manager.generate(request_id, ...)         <--        every segment; one request_id for a tree
    rewards, advantages, training                    <--        AgentLoopOutput: ids, mask, log-probabilities

verl makes an agent loop for each of the n rollouts of a prompt. A worker starts all its loops at the same time. The
first call starts a task for the tree and the others join it; one turn of the event loop later the task counts its
members, which are its width. So n may differ from prompt to prompt.

Configuration, a file that actor_rollout_ref.rollout.agent.agent_loop_config_path names:

    - name: treepack_tree
      _target_: treepack.rollout.trainers.verl_rollout.TreeAgentLoop
      tree: {segment: 512, depth: 14, first_forks: [2, 8]}
"""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any
from uuid import uuid4

import numpy as np
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.utils.fs import copy_to_local
from verl.utils.model import get_generation_config

from treepack.errors import TreepackError
from treepack.rollout.engine import ABORT, LENGTH, STOP, Segment, derived_seed
from treepack.rollout.options import Sampling, TreeOptions
from treepack.rollout.query import Query
from treepack.rollout.requests import LimitedEngine, all_or_none
from treepack.rollout.trainers.sampled_leaves import SampledLeaf, TrainerWorld, check_width, read_leaves, sample_query
from treepack.rollout.user_code import load_callable
from treepack.trajectory import Int32

_ATTEMPTS = 5  # of a request that the server aborted; the pauses between them are 0.5, 1, 2 and 4 seconds
_TIMEOUT = 24 * 3600.0  # seconds; verl waits for its servers without a limit


class TreeAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """An agent loop whose n calls for one prompt sample one tree.

    Calls whose sampling parameters differ from the training's (validation, the greedy baseline of REMAX) sample
    independent rollouts, because the leaves of a tree are not independent.

    Args:
        tree: fields of `TreeOptions` other than width and max_tokens, which are the number of calls and
            rollout.response_length.
        environment: "module:name" of a function that makes the environment of a prompt from the columns of verl's batch
            and the tokenizer, for rollouts of several turns; see docs/environments.md. If its reward is None, verl's
            own reward is used.
        stop_token_ids: tokens that end a turn; by default from the model's generation config and the tokenizer.
        seed: of all choices.

    Raises:
        TreepackError: `tree` has an unknown field, or a shape that does not always reach its width.
    """

    # Trees that still take members. All agent loops of a worker run in one event loop.
    _waiting: dict[tuple[Any, ...], _SharedTree] = {}  # noqa: RUF012

    def __init__(
        self,
        *args: Any,
        tree: Any = None,
        environment: str | None = None,
        stop_token_ids: Any = None,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._options = _tree_options(tree, int(self.rollout_config.response_length))
        self._environment = None if environment is None else load_callable(environment)
        self._stops = tuple(int(token) for token in stop_token_ids or ())
        self._seed = seed

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Return one leaf of the tree of `kwargs["uid"]`.

        Raises:
            TreepackError: the batch has no uid, images, or sampling parameters that engines do not have; or the
                sampling failed.
        """
        if "uid" not in kwargs:
            raise TreepackError(
                "verl: the batch has no column uid; give the rollouts of a prompt the same uid, as verl's trainers do"
            )
        # No await before this call has joined its tree: verl starts the calls of a prompt in one turn of the loop.
        is_training = all(
            sampling_params[name] == self.rollout_config[name] for name in ("temperature", "top_p", "top_k")
        )
        key = (str(kwargs["uid"]),) if is_training else (str(kwargs["uid"]), uuid4().hex)
        shared = self._waiting.get(key)
        if shared is None:
            shared = self._waiting[key] = _SharedTree()
            shared.task = asyncio.ensure_future(self._sample(shared, key, sampling_params, kwargs))
        place = shared.num_members
        shared.num_members += 1
        shared.num_waiting += 1
        try:
            return (await asyncio.shield(shared.task))[place]
        finally:
            shared.num_waiting -= 1
            # Cancelled calls leave; a tree without a waiting call is cancelled too.
            if shared.num_waiting == 0 and not shared.task.done():
                shared.task.cancel()
                self._waiting.pop(key, None)

    async def _sample(
        self, shared: _SharedTree, key: tuple[str, ...], sampling_params: dict[str, Any], fields: dict[str, Any]
    ) -> list[AgentLoopOutput]:
        """Sample the tree of the members that have joined by now, and return one output for each."""
        await asyncio.sleep(0)
        self._waiting.pop(key, None)
        options = replace(self._options, width=shared.num_members)
        if len(key) > 1:
            options = replace(options, segment=None, depth=None, first_forks=None)
        check_width(options, caller="verl", name="the number of rollouts")
        messages = list(fields["raw_prompt"])
        if await self.process_multi_modal_info(messages):
            raise TreepackError("verl: the prompt has images, videos or audio; trees are sampled from text only")
        prompt = np.array(await self.ct_build_initial_tokens(messages), np.int32)
        engine = _VerlEngine(
            self.server_manager,
            _sampling(sampling_params, self._stops or self._default_stops()),
            sampling_params,
            is_repeatable=bool(getattr(self.rollout_config, "full_determinism", False)),
            is_sglang=self.rollout_config.name == "sglang",
        )
        name = key[0]
        if engine.is_repeatable:
            # verl draws each uid at random; the place in the batch and the prompt are the same in every run.
            name = f"{fields.get('priority', 0)} {derived_seed(*prompt.tolist())}"
        limited = LimitedEngine(engine, max_requests=options.width, attempts=_ATTEMPTS, timeout=_TIMEOUT)
        start = perf_counter()
        query = Query(name, name, prompt, fields=fields, source="verl")
        tree = await sample_query(query, limited, options, TrainerWorld(self._environment, self.tokenizer, self._seed))
        seconds = perf_counter() - start
        return [_output(leaf, tree.query.prompt, engine, seconds) for leaf in read_leaves(tree)]

    def _default_stops(self) -> tuple[int, ...]:
        model = self.config.actor_rollout_ref.model
        stops = _generation_stops(model.path, bool(model.get("trust_remote_code")))
        return tuple(dict.fromkeys((*stops, self.tokenizer.eos_token_id)))


@dataclass(slots=True, eq=False)
class _SharedTree:
    """The task of a tree, the number of calls that have joined it, and the number that still wait for it."""

    task: asyncio.Future[list[AgentLoopOutput]] = None  # type: ignore[assignment]  # set before anything waits
    num_members: int = 0
    num_waiting: int = 0


def _tree_options(tree: Any, max_tokens: int) -> TreeOptions:
    """Return the options that a configuration names.

    Raises:
        TreepackError: it names an unknown field, or one that verl sets.
    """
    fields: dict[str, Any] = dict(OmegaConf.to_container(OmegaConf.create(tree or {})))
    known = set(TreeOptions.__dataclass_fields__) - {"width", "max_tokens", "is_answer"}
    if unknown := set(fields) - known:
        raise TreepackError(
            f"verl: tree has {', '.join(sorted(unknown))}; expected fields among {', '.join(sorted(known))}"
        )
    # A file has lists for pairs: first_forks: [2, 8]
    pairs: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return TreeOptions(max_tokens=max_tokens, **pairs)


def _sampling(params: dict[str, Any], stops: tuple[int, ...]) -> Sampling:
    """Return the distribution that verl's sampling parameters describe.

    Raises:
        TreepackError: a parameter that changes it in a way that engines do not have.
    """
    if params.get("repetition_penalty", 1.0) != 1.0:
        raise TreepackError("verl: repetition_penalty is not 1, which tree sampling does not have; leave it out")
    top_k = max(int(params["top_k"]), 0)
    if params["temperature"] == 0:
        return Sampling(top_k=1, stop_token_ids=stops)  # greedy, which is the same distribution
    return Sampling(float(params["temperature"]), float(params["top_p"]), top_k, stops)


@functools.cache
def _generation_stops(path: str, trust_remote_code: bool) -> tuple[int, ...]:
    """Return the ids of the end of a sequence in the generation config of the model at `path`."""
    config = get_generation_config(copy_to_local(path), trust_remote_code=trust_remote_code)
    stops = getattr(config, "eos_token_id", None)
    return tuple(stops) if isinstance(stops, list) else () if stops is None else (stops,)


class _VerlEngine:
    """verl's server manager as an engine: one request for each continuation, all with the same request_id.

    The server manager sends equal ids to the same server, whose cache holds the prefix then. `first_step` and
    `last_step` are the training steps of the weights that have sampled, None if the server does not report them.
    """

    def __init__(
        self, manager: Any, sampling: Sampling, params: dict[str, Any], *, is_repeatable: bool, is_sglang: bool
    ) -> None:
        self.manager = manager
        self.sampling = sampling
        self.is_repeatable = is_repeatable
        self.first_step: int | None = None
        self.last_step: int | None = None
        self._params = {**params, "stop_token_ids": list(sampling.stop_token_ids)}
        self._seed_name = "sampling_seed" if is_sglang else "seed"
        self._request_id = uuid4().hex

    async def extend(self, ids: Int32, *, count: int, max_tokens: int, seed: int) -> list[Segment]:
        """Continue `ids` by `count` requests side by side.

        Raises:
            EngineError: the server's log-probabilities do not fit its tokens.
        """
        return await all_or_none(self._request(ids, max_tokens, derived_seed(seed, i)) for i in range(count))

    async def _request(self, ids: Int32, max_tokens: int, seed: int) -> Segment:
        params, request_id = {**self._params, "max_tokens": max_tokens}, self._request_id
        if self.is_repeatable:
            # Then verl passes the id on to the server, where ids of requests under way must differ.
            params[self._seed_name], request_id = seed, f"det-{seed}"
        # The servers remove entries of the parameters, so every request gets a copy.
        output = await self.manager.generate(request_id=request_id, prompt_ids=ids.tolist(), sampling_params=params)
        tokens = np.array(output.token_ids, np.int32)
        logprobs = np.array(output.log_probs, np.float32) if output.log_probs else None
        if output.stop_reason in ("aborted", "abort") or len(tokens) == 0:
            return Segment(tokens, None, ABORT)
        # verl's reason is "completed" for a stop token as well as for the limit of tokens.
        finish = STOP if int(tokens[-1]) in self.sampling.stop_token_ids else LENGTH
        step = output.extra_fields.get("max_global_steps")
        self._count_steps(output.extra_fields)
        cached = output.extra_fields.get("num_cached_tokens")
        # Only with rollout.enable_rollout_routing_replay.
        routes = None if output.routed_experts is None else np.asarray(output.routed_experts)
        return Segment(tokens, logprobs, finish, "" if step is None else str(step), cached, routes)

    def _count_steps(self, fields: dict[str, Any]) -> None:
        first, last = fields.get("min_global_steps"), fields.get("max_global_steps")
        if first is not None and last is not None:
            self.first_step = first if self.first_step is None else min(self.first_step, first)
            self.last_step = last if self.last_step is None else max(self.last_step, last)

    async def publish(self, version: str) -> None:
        """Nothing to do: verl updates the servers itself, and clears their caches."""

    async def close(self) -> None:
        """Nothing to do: the server manager is verl's."""


def _output(leaf: SampledLeaf, prompt: Int32, engine: _VerlEngine, seconds: float) -> AgentLoopOutput:
    """Return a leaf as verl expects it."""
    return AgentLoopOutput(
        prompt_ids=prompt.tolist(),
        response_ids=leaf.response,
        response_mask=leaf.mask,
        response_logprobs=leaf.logprobs,
        routed_experts=None if leaf.routes is None else leaf.routes.astype(np.int16),
        reward_score=leaf.reward,
        num_turns=2 * leaf.num_turns,  # a turn of the user before each turn of the model
        metrics=AgentLoopMetrics(generate_sequences=seconds),
        extra_fields={
            **leaf.fields,
            "turn_scores": [],
            "tool_rewards": [],
            "min_global_steps": engine.first_step,
            "max_global_steps": engine.last_step,
        },
    )
