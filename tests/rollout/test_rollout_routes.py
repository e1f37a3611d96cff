"""Rollouts from a server that returns the experts of its routers have these experts, once for each sampled token."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson
import pytest
from aiohttp import web

from support.command_line import Run
from support.engine_server import APIS, EngineServer, experts_of, in_thread, running
from support.refusal import refusal
from treepack.files.manifest import read_manifest
from treepack.rollout.engine import EngineError, Segment
from treepack.rollout.episode import SingleTurn
from treepack.rollout.options import Sampling, TreeOptions
from treepack.rollout.query import Query
from treepack.rollout.records import path_routes, tree_trajectories
from treepack.rollout.sampler import sample_tree
from treepack.rollout.servers.dialects import DIALECTS
from treepack.rollout.servers.server import ServerEngine, connect
from treepack.rollout.servers.server_routes import routes_of_answer
from treepack.rollout.tree import Tree
from treepack.trajectory import Int32, Tokens
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.store.trie_files import read_trie

LAYERS = 3
IDS = np.array([5, 6, 7], np.int32)
OPTIONS = TreeOptions(width=8, segment=4, depth=4, max_tokens=16, branches=2, fallback="random")
Result = TypeVar("Result")


@dataclass(frozen=True)
class TwoTurns:
    """An episode that answers the first turn with two tokens."""

    num_turns: int = 0

    async def after(self, turn: Int32) -> tuple[TwoTurns, Int32 | None]:
        return TwoTurns(self.num_turns + 1), np.array([9, 8], np.int32) if self.num_turns == 0 else None

    async def reward(self, rest: Int32) -> float | None:
        return None

    async def close(self) -> None:
        pass


def use(server: EngineServer, act: Callable[[ServerEngine], Awaitable[Result]], **options: Any) -> Result:
    async def run() -> Result:
        async with running(server) as url:
            engine = await connect(url, Sampling(stop_token_ids=(0,)), keep_routes=True, **options)
            try:
                return await act(engine)
            finally:
                await engine.close()

    return asyncio.run(run())


def sampled(api: str, *, episode: Any = SingleTurn()) -> Tree:  # noqa: B008 (immutable)
    async def act(engine: ServerEngine) -> Tree:
        return await sample_tree(Query("q", "q", IDS), engine, OPTIONS, episode=episode, seed=3)

    return use(EngineServer(api=api, route_layers=LAYERS), act, route_layers=LAYERS if api == "sglang" else None)


@pytest.mark.parametrize("api", APIS)
def test_leaves_have_the_experts_of_all_tokens_but_the_last(api: str) -> None:
    tree = sampled(api, episode=TwoTurns())
    assert any(len(node.observation) for node in tree.nodes())
    for leaf, trajectory in zip(tree.leaves, tree_trajectories(tree), strict=True):
        assert isinstance(trajectory.content, Tokens)
        tokens, routes = trajectory.content.tokens, trajectory.content.routes
        assert routes is not None
        assert routes[:-1].tolist() == experts_of(tokens[:-1], LAYERS).tolist()
        assert (routes[-1] == 255).all()
        own = path_routes(leaf)
        assert own is not None
        assert own.tolist() == routes[:-1].tolist()


def test_experts_that_are_equal_for_equal_tokens_do_not_split_a_tree() -> None:
    tree = sampled("generate")
    trajectories = tree_trajectories(tree)
    split, shared = build_trie(trajectories), build_trie(trajectories, route_conflicts="first")
    # A leaf that another one continues has no experts for its last token.
    assert len(shared.tokens) <= len(split.tokens) <= len(shared.tokens) + len(tree.leaves)
    assert len(shared.tokens) < sum(
        len(each.content.tokens) for each in trajectories if isinstance(each.content, Tokens)
    )


@pytest.mark.parametrize("api", APIS)
def test_a_server_without_experts_is_refused_before_anything_is_sampled(api: str) -> None:
    with pytest.raises(EngineError, match="start the server with --enable-return-routed-experts"):
        use(EngineServer(api=api), lambda engine: engine.close(), route_layers=LAYERS)


@pytest.mark.parametrize(("layers", "words"), [(None, "give it with --route-layers"), (5, "correct --route-layers")])
def test_sglang_needs_the_layers_of_the_model(layers: int | None, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        use(EngineServer(api="sglang", route_layers=LAYERS), lambda engine: engine.close(), route_layers=layers)


def test_experts_that_are_no_file_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = web.json_response

    def damaged(value: Any, **options: Any) -> web.Response:
        for choice in value.get("choices", ()):
            choice["routed_experts"] = base64.b64encode(b"damaged").decode()
        return own(value, **options)

    monkeypatch.setattr(web, "json_response", damaged)
    with pytest.raises(EngineError, match="in another form"):
        use(EngineServer(), lambda engine: engine.close())


def test_an_answer_without_any_expert_is_refused() -> None:
    dialect = next(each for each in DIALECTS if each.name == "SGLang")
    with pytest.raises(EngineError, match=r"\[3, 2, 0\] of int32; expected integers"):
        routes_of_answer(dialect, {"meta_info": {"routed_experts": ""}}, sizes=[3], layers=2, url="http://localhost:1")


def test_an_engine_with_too_few_rows_is_refused() -> None:
    class Short:
        sampling = Sampling()

        async def extend(self, ids: Int32, *, count: int, max_tokens: int, seed: int) -> list[Segment]:
            return [Segment(ids[:1], None, "stop", routes=np.zeros((1, 1, 2), np.uint8))] * count

    sampled = sample_tree(Query("q", "q", IDS), Short(), OPTIONS, episode=SingleTurn())  # type: ignore[arg-type]
    assert "the experts of 1 tokens; expected 3" in refusal(asyncio.run, sampled)


def test_the_command_keeps_experts_that_build_trie_reads(treepack: Run, tmp_path: Path) -> None:
    prompts, out, trie = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl", tmp_path / "trie"
    prompts.write_bytes(orjson.dumps({"id": "a", "prompt_token_ids": IDS.tolist()}))
    shape = ["--sampler", "independent", "--width", 4, "--max-tokens", 8, "--stop-token-id", 0, "--out", out]
    with in_thread(EngineServer(route_layers=LAYERS)) as url:
        sampling = treepack("rollout", prompts, "--engine", url, "--keep-routes", *shape)
    assert sampling.status == 0, sampling.err
    assert treepack("build-trie", out, "--out", trie, "--keep-routes").status == 0
    assert read_manifest(trie, "treepack-trie")["routes"]["layers"] == LAYERS
    routes = read_trie(trie).routes
    assert routes is not None
    assert treepack("build-trie", out, "--out", tmp_path / "plain").status == 0
    assert read_trie(tmp_path / "plain").routes is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine", "model", "--keep-routes"], "reads the experts of a server"),
        (["--engine", "http://localhost:1", "--route-layers", 2], "give --keep-routes too"),
    ],
)
def test_options_that_need_others_are_refused(options: list[Any], words: str, treepack: Run, tmp_path: Path) -> None:
    run = treepack("rollout", tmp_path, "--sampler", "independent", "--out", tmp_path / "out.jsonl", *options)
    assert run.status == 2
    assert words in " ".join(run.err.split())
