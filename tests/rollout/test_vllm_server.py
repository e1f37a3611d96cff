"""A real vLLM server gives the tokens and log-probabilities of the model, and every failure is one sentence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson
import pytest
import torch

from support.vllm_servers import MAX_LEN, VllmServer, VllmServers, kill, running_servers
from treepack import load_model
from treepack.errors import TreepackError
from treepack.online import tree_logprobs_like
from treepack.rollout.engine import EngineError
from treepack.rollout.episode import SingleTurn
from treepack.rollout.options import RolloutOptions, Sampling, TreeOptions
from treepack.rollout.query import Query
from treepack.rollout.run import sample_rollouts
from treepack.rollout.sampler import sample_tree
from treepack.rollout.servers.server import SampleText, ServerEngine, connect
from treepack.rollout.tree import Tree

pytestmark = pytest.mark.vllm

Result = TypeVar("Result")
VOCAB_SIZE = 1464
STOPS = tuple(range(2, VOCAB_SIZE, 16))  # of a model with random weights, a response has some 16 tokens
# At most 8 paths of 3 segments, so a fallback adds the others.
SHAPE = TreeOptions(width=12, max_tokens=48, segment=8, depth=3, max_repeats=0)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServers]:
    with running_servers(tmp_path_factory.mktemp("vllm")) as started:
        yield started


def use(
    server: VllmServer,
    act: Callable[[ServerEngine], Awaitable[Result]],
    *,
    temperature: float = 0.7,
    stops: tuple[int, ...] = STOPS,
    **options: Any,
) -> Result:
    async def run() -> Result:
        engine = await connect(server.url, Sampling(temperature, stop_token_ids=stops), **options)
        try:
            return await act(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def query(number: int, length: int = 200) -> Query:
    ids = np.random.default_rng(number).integers(3, VOCAB_SIZE, length).astype(np.int32)
    return Query(f"q{number}", f"q{number}", ids)


async def tree_of(engine: ServerEngine, number: int = 0) -> Tree:
    return await sample_tree(query(number), engine, SHAPE, episode=SingleTurn(), seed=5)


def largest_difference(tree: Tree, model: Path) -> float:
    """Largest difference between the server's log-probabilities and those of treepack's forward pass in float32."""
    ids = [torch.from_numpy(leaf.ids().astype(np.int64)) for leaf in tree.leaves]
    loaded = load_model(model).model.eval()
    with torch.no_grad():
        scored, _ = tree_logprobs_like(loaded, ids, temperature=tree.sampling.temperature)
    largest = 0.0
    for leaf, values in zip(tree.leaves, scored, strict=True):
        sampled = [node.logprobs for node in leaf.path()[1:] if node.logprobs is not None]
        expected = values[len(tree.query.prompt) :].float().numpy()
        largest = max(largest, float(np.abs(np.concatenate(sampled) - expected).max()))
    return largest


def test_log_probabilities_in_float32_are_those_of_a_forward_pass_at_temperature_0_7(servers: VllmServers) -> None:
    tree = use(servers.exact, tree_of)
    assert any(node.is_fallback for node in tree.nodes())
    assert len(tree.leaves) == SHAPE.width
    assert largest_difference(tree, servers.model) < 1e-5
    # They differ from token to token, so the comparison can fail.
    assert np.ptp(np.concatenate([node.logprobs for node in tree.nodes() if node.logprobs is not None])) > 1


def test_log_probabilities_of_a_server_in_bfloat16_are_those_of_a_forward_pass(servers: VllmServers) -> None:
    tree = use(servers.default, tree_of, temperature=1.0)
    assert len(tree.leaves) == SHAPE.width
    assert largest_difference(tree, servers.model) < 1e-2


def test_the_api_of_a_server_is_found(servers: VllmServers) -> None:
    async def path(engine: ServerEngine) -> tuple[str, str | None, int | None]:
        return engine.found.dialect.path, engine.found.model, engine.found.max_len

    assert use(servers.exact, path) == ("/inference/v1/generate", "tiny", MAX_LEN)
    assert use(servers.default, path, temperature=1.0) == ("/v1/completions", "tiny", MAX_LEN)


def test_raw_log_probabilities_are_refused_at_temperature_0_7(servers: VllmServers) -> None:
    with pytest.raises(EngineError, match=r"not to 0\.7; start it with --logprobs-mode processed_logprobs"):
        use(servers.default, tree_of)


def test_a_segment_ends_with_its_stop_token_and_no_other_token_stops(servers: VllmServers) -> None:
    for server, temperature in ((servers.exact, 0.7), (servers.default, 1.0)):
        tree = use(server, tree_of, temperature=temperature)
        for node in list(tree.nodes())[1:]:
            assert not np.isin(node.tokens[:-1], STOPS).any()
            assert (node.finish == "stop") == bool(np.isin(node.tokens[-1], STOPS))
        assert any(leaf.finish == "stop" for leaf in tree.leaves)


def test_the_same_seed_gives_the_same_tree(servers: VllmServers) -> None:
    first, second = (use(servers.exact, tree_of) for _ in range(2))
    assert [leaf.ids().tolist() for leaf in first.leaves] == [leaf.ids().tolist() for leaf in second.leaves]
    assert len({leaf.ids().tobytes() for leaf in first.leaves}) == SHAPE.width


def test_prefixes_come_from_the_cache_of_the_server_until_a_new_policy_is_published(servers: VllmServers) -> None:
    async def act(engine: ServerEngine) -> list[int | None]:
        ids, cached = query(9).prompt, []
        for version in ("", "", "7", "7"):
            if version:
                await engine.publish(version)
            (segment,) = await engine.extend(ids, count=1, max_tokens=2, seed=1)
            cached.append(segment.num_cached)
        return cached

    # vLLM's blocks have 128 tokens on a CPU.
    assert use(servers.exact, act) == [0, 128, 0, 128]
    tree = use(servers.exact, partial(tree_of, number=1))
    assert tree.usage.cached is not None
    assert tree.usage.cached > tree.usage.prefilled / 3


def test_another_tokenizer_and_ids_outside_of_the_vocabulary_leave_the_server_alive(servers: VllmServers) -> None:
    async def wrong(engine: ServerEngine) -> None:
        await engine.extend(np.array([5, VOCAB_SIZE], np.int32), count=1, max_tokens=2, seed=1)

    with pytest.raises(EngineError, match="has another tokenizer: 'A tree' has the ids"):
        use(servers.exact, tree_of, sample_text=SampleText("A tree", [1, 2]))
    for server, temperature in ((servers.exact, 0.7), (servers.default, 1.0)):
        with pytest.raises(EngineError, match=rf"refuses the token id {VOCAB_SIZE} \(.*out"):
            use(server, wrong, temperature=temperature)
    assert len(use(servers.exact, tree_of).leaves) == SHAPE.width


def test_a_cancelled_call_leaves_the_server_answering(servers: VllmServers) -> None:
    async def act(engine: ServerEngine) -> Tree:
        call = engine.extend(query(2).prompt, count=4, max_tokens=800, seed=1)
        task = asyncio.ensure_future(call)
        await asyncio.sleep(0.3)  # 800 tokens take seconds
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        return await tree_of(engine, 3)

    # Only the model's own end of sequence stops here, one token of 1,464.
    assert len(use(servers.exact, act, stops=()).leaves) == SHAPE.width


def test_a_server_that_is_killed_leaves_the_finished_trees_and_one_sentence(
    servers: VllmServers, tmp_path: Path
) -> None:
    """The last test of this file, because no server is left for another."""

    async def act(engine: ServerEngine) -> None:
        async def kill_after_two_trees() -> None:
            while not out.exists() or out.read_bytes().count(b"\n") < 2 * SHAPE.width:
                await asyncio.sleep(0.05)
            kill(servers.exact.process)

        killer = asyncio.ensure_future(kill_after_two_trees())
        run = RolloutOptions(max_queries=2, attempts=2, timeout=60)
        try:
            await sample_rollouts([query(number) for number in range(500)], engine, SHAPE, out=out, run=run)
        finally:
            await killer

    out = tmp_path / "rollouts.jsonl"
    with pytest.raises(TreepackError, match=r"^http://127\.0\.0\.1:\d+(/\S+)?: .*resume") as error:
        use(servers.exact, act)
    assert "\n" not in str(error.value)
    groups = [orjson.loads(line)["group_id"] for line in out.read_bytes().splitlines()]
    assert len(groups) >= 2 * SHAPE.width
    assert all(groups.count(name) == SHAPE.width for name in groups)
