"""verl's own worker of agent loops over a server of known law, without Ray, GPUs or a model.

DataProto --AgentLoopWorker--> TreeAgentLoop.run --LLMServerClient.generate--> LawServer --> DataProto
"""

from __future__ import annotations

import asyncio
import copy
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.protocol import DataProto
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from support.engine_server import experts_of
from support.wide_law import wide_law

PROMPT, RESPONSE = 24, 40  # verl's widths of prompts and responses
RUNS = 3  # verl's global_steps of the servers' weights


class LawServer:
    """What a server of verl does: pops the limit of tokens, and says completed for a stop and for the limit."""

    def __init__(self, aborts: int = 0, *, has_routes: bool = False) -> None:
        self.has_routes = has_routes
        self.law = wide_law()
        self.requests: list[dict[str, Any]] = []
        self.aborts = aborts
        self.generate = SimpleNamespace(remote=self._generate)

    async def _generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **others: Any
    ) -> TokenOutput:
        self.requests.append({"request_id": request_id, "prompt_ids": prompt_ids, **sampling_params})
        number = len(self.requests)
        await asyncio.sleep(0)
        if number <= self.aborts:
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields={"global_steps": RUNS})
        rng = np.random.default_rng(sampling_params.get("seed", number))
        ids = np.array(prompt_ids, np.int32)
        tokens, logprobs = self.law.sample(ids, max_tokens=sampling_params.pop("max_tokens"), rng=rng)
        return TokenOutput(
            token_ids=tokens.tolist(),
            log_probs=logprobs.tolist() if sampling_params["logprobs"] else None,
            stop_reason="completed",
            routed_experts=experts_of([*prompt_ids, *tokens.tolist()][:-1], 2) if self.has_routes else None,
            extra_fields={"global_steps": RUNS, "num_cached_tokens": 0},
        )


class OneServer(LLMServerClient):  # type: ignore[misc]
    """verl's client with one server in place of those that Ray balances; `sessions` are the ids of its requests."""

    def __init__(self, config: Any, server: LawServer) -> None:
        super().__init__(config)
        self.server = server
        self.sessions: list[str] = []

    async def _acquire_server(self, request_id: str, **fields: Any) -> tuple[str, Any]:
        self.sessions.append(request_id)
        return "server", self.server

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        pass


@functools.cache
def _defaults() -> Any:
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer")


def run_worker(
    model: str, loops: Path, *, server: LawServer | None = None, **settings: Any
) -> tuple[DataProto, OneServer]:
    """Run `generate` to its end."""
    return asyncio.run(generate(model, loops, server=server or LawServer(), **settings))


async def generate(
    model: str, loops: Path, *, server: LawServer, n: int = 6, validate: bool = False, **rollout: Any
) -> tuple[DataProto, OneServer]:
    """Generate n rollouts for each of two prompts as verl's trainer does, and return verl's batch and the client.

    Args:
        model: folder of a model's configuration and tokenizer.
        loops: the file that agent_loop_config_path names; its only entry is called treepack_tree.
        server: answers the requests.
        n: rollouts of a prompt.
        validate: with verl's sampling parameters of a validation.
        rollout: changes to verl's configuration of rollouts.
    """
    settings = {
        "name": "vllm",
        "prompt_length": PROMPT,
        "response_length": RESPONSE,
        "calculate_log_probs": True,
        "agent.agent_loop_config_path": str(loops),
        "agent.default_agent_loop": "treepack_tree",
        **rollout,
    }
    config = copy.deepcopy(_defaults())
    config.actor_rollout_ref.model.path = model
    for name, value in settings.items():
        OmegaConf.update(config.actor_rollout_ref.rollout, name, value)
    texts = [[{"role": "user", "content": "a tree"}], [{"role": "user", "content": "a row of tokens"}]]
    prompts = np.empty(2, object)
    prompts[:] = texts
    columns = {"raw_prompt": prompts, "uid": np.array(["first", "second"], object), "index": np.arange(2)}
    batch = DataProto.from_dict(non_tensors=columns, meta_info={"validate": validate, "global_steps": RUNS})
    batch = batch.repeat(repeat_times=n, interleave=True)
    # As AgentLoopManager does before it divides the batch among its workers.
    batch.non_tensor_batch["priority"] = np.arange(len(batch))
    client = OneServer(config, server)
    return await AgentLoopWorker(config, client).generate_sequences(batch), client
