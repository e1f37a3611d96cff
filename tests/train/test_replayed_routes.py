"""Packed rows with recorded routes give what each trajectory alone gives under its own routes."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from support.command_line import Run
from support.oracle_model import gradients, packed_directory, tiny_config, worst_error
from support.rank_processes import CPU, Case, train_over
from support.recorded_routes import with_routes
from support.strategies import make
from support.tiny_families import KeepFloat64, tiny_family
from treepack.attention import IMPLEMENTATIONS, register
from treepack.carry.verify import in_pieces
from treepack.data.dataset import PackedDataset
from treepack.data.row_parts import RowPart, restrict_row
from treepack.errors import TreepackError
from treepack.model.experts.routers import follow_routers
from treepack.model.forward import row_loss
from treepack.model.layers import checkpoint_layers
from treepack.model.loaded import LoadedModel
from treepack.model.verify.gradients import verify_gradients
from treepack.pack.files import read_rows
from treepack.train.logprobs import open_scoring, scored_rows
from treepack.train.scoring_options import ScoreOptions
from treepack.train.setup.opening import open_run
from treepack.trajectory import Routes, Tokens, Trajectory

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "initializer_range": 0.5}
PATHS = [
    (*range(1, 10), 21, 22, 23),
    (*range(1, 10), 31, 32),
    (*range(1, 6), 41, 42, 43, 44),
    (*range(1, 6), 41, 45),
    (7, 8, 9, 10),
]


def recorded(*, layers: int = 2, experts: int = 4, k: int = 2, seed: int = 0) -> list[Trajectory]:
    """The trajectories of `PATHS`: routes agree on most shared tokens, differ on one, and are missing at the ends."""
    generator = np.random.default_rng(seed)
    of_prefix: dict[tuple[int, ...], Any] = {}
    result = []
    for i, path in enumerate(PATHS):
        rows = []
        for end in range(1, len(path) + 1):
            own = generator.random((layers, experts)).argsort(-1)[:, :k]
            rows.append(of_prefix.setdefault(path[:end], own))
        routes = np.array(rows, np.uint8)
        if i == 1:
            routes[7] = generator.random((layers, experts)).argsort(-1)[:, :k]
        routes[-1] = 255
        rewarded = make(f"t{i}", list(path), group="g", reward=float(i), advantages=[0.5 - i] * (len(path) - 1))
        result.append(with_routes(rewarded, routes))
    return result


def routes_of(trajectory: Trajectory) -> Routes:
    assert isinstance(trajectory.content, Tokens)
    assert trajectory.content.routes is not None
    return trajectory.content.routes


def gradients_alone(model: Any, trajectories: list[Trajectory]) -> dict[str, Tensor]:
    """The gradients of all trajectories run alone by a Qwen 3 MoE whose routers are written out here."""
    current: list[Tensor] = []

    def route(router: Any, layer: int, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        states = states.reshape(-1, states.shape[-1])
        scores = states @ router.weight.T
        p = scores.softmax(-1)
        experts = p.topk(2, -1).indices
        given = current[0][:, layer]
        experts = torch.where(given < 255, given, experts)
        weights = p.gather(1, experts)
        return scores, weights / weights.sum(-1, keepdim=True), experts

    for layer, block in enumerate(model.model.layers):
        block.mlp.gate.forward = functools.partial(route, block.mlp.gate, layer)
    model.zero_grad()
    for each in trajectories:
        assert isinstance(each.content, Tokens)
        tokens = torch.from_numpy(each.content.tokens.astype(np.int64))
        current[:] = [torch.from_numpy(routes_of(each).astype(np.int64))]
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        torch.autograd.backward(cross_entropy(logits, tokens[1:], reduction="sum"))
    return gradients(model)


def loaded_family(kind: str, **fields: Any) -> LoadedModel:
    register()
    return LoadedModel(tiny_family(kind, attention=IMPLEMENTATIONS["reference"], **fields), kind, "reference", ())


def test_rows_give_the_gradients_of_a_router_written_out(tmp_path: Path) -> None:
    trajectories = recorded()
    dataset = PackedDataset(packed_directory(tmp_path / "packed", trajectories, capacity=24), routes=True)
    assert len(dataset) > 1
    with KeepFloat64():
        expected = gradients_alone(tiny_family("qwen3_moe", norm_topk_prob=True), trajectories)
        loaded = loaded_family("qwen3_moe", norm_topk_prob=True)
        for batch in dataset:
            torch.autograd.backward(row_loss(loaded, batch))
        assert worst_error(gradients(loaded.model), expected) <= 1e-9
        free = loaded_family("qwen3_moe", norm_topk_prob=True)
        for batch in PackedDataset(dataset.path):
            torch.autograd.backward(row_loss(free, batch))
        assert worst_error(gradients(free.model), expected) > 1e-2


GROUPS: dict[str, Any] = {"first_k_dense_replace": 0, "n_group": 2, "topk_group": 1}
KINDS: list[tuple[str, dict[str, Any]]] = [("deepseek_v3", GROUPS), ("gpt_oss", {}), ("hunyuan_v1_moe", {})]
OTHERS = "mixtral qwen2_moe olmoe granitemoe minimax_m2 dots1 deepseek_v2 llama4_text".split()
# Every second of the others in pieces.
CASES = [pytest.param(*case, limit, id=f"{case[0]}-{limit}") for case in KINDS for limit in (None, 4)]
CASES += [pytest.param(kind, {}, (None, 4)[i % 2], id=kind, marks=pytest.mark.slow) for i, kind in enumerate(OTHERS)]


@pytest.mark.parametrize(("kind", "fields", "limit"), CASES)
def test_verification_passes_in_rows_and_in_pieces(
    kind: str, fields: dict[str, Any], limit: int | None, tmp_path: Path
) -> None:
    loaded = loaded_family(kind, **fields)
    k = int(loaded.model.config.num_experts_per_tok)
    trajectories = recorded(layers=len(follow_routers(loaded.model)), k=k)
    packed = packed_directory(tmp_path / "packed", trajectories, capacity=40)
    if limit is not None:
        checkpoint_layers(loaded.model)
        loaded.model.train()
    batches = [*PackedDataset(packed, routes=True)]
    backward = None if limit is None else in_pieces(limit)
    report = verify_gradients(loaded, batches, backward=backward)
    assert report.passed, report.worst
    free = verify_gradients(loaded, [*PackedDataset(packed)])
    assert abs(free.loss_alone - report.loss_alone) > 1e-5 * abs(free.loss_alone)


def test_a_part_of_a_row_keeps_its_routes(tmp_path: Path) -> None:
    (batch,) = PackedDataset(packed_directory(tmp_path / "packed", recorded(), capacity=64), routes=True)
    part = restrict_row(batch, RowPart((1,), 2, 6))
    (own,) = (each for each in recorded() if each.trajectory_id == batch.trajectory_ids[1])
    assert part.routes is not None
    assert part.routes.tolist() == routes_of(own)[2:6].tolist()


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    return tiny_config(tmp_path / "config.json", "qwen3", **EXPERTS, model_type="qwen3_moe")


def test_scores_are_those_of_each_trajectory_alone_and_also_in_pieces(tmp_path: Path, mixture: Path) -> None:
    together = packed_directory(tmp_path / "packed", recorded(), capacity=40)

    def scores(packed: Path, **options: Any) -> dict[str, list[float]]:
        result: dict[str, list[float]] = {}
        for row in scored_rows(open_scoring(packed, mixture, ScoreOptions(device="cpu", dtype="fp32", **options))):
            assert row.terms is not None
            assert row.terms.old_logprob is not None
            assert row.routes is not None, "the output keeps the routes"
            for i, name in enumerate(row.trajectory_ids):
                result[name] = row.terms.old_logprob[row.terms.trajectory == i].tolist()
        return result

    expected: dict[str, list[float]] = {}
    for i, each in enumerate(recorded()):
        expected |= scores(packed_directory(tmp_path / f"alone{i}", [each], capacity=40))
    for options in ({}, {"carry": 4}):
        found = scores(together, **options)
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=1e-5)
    ignored = scores(together, routes="ignore")
    assert any(not np.allclose(ignored[name], expected[name], rtol=1e-3) for name in expected)


ROLLOUTS = "rollouts.jsonl"


def write_rollouts(path: Path, trajectories: list[Trajectory]) -> Path:
    with path.open("w") as file:
        for each in trajectories:
            assert isinstance(each.content, Tokens)
            ids = each.content.tokens.tolist()
            mask = [0, *[1] * (len(ids) - 1)]
            record = {"input_ids": ids, "loss_mask": mask, "reward": each.reward, "group_id": "g"}
            file.write(json.dumps(record | {"routed_experts": routes_of(each)[:-1].tolist()}) + "\n")
    return path


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def test_the_commands_keep_split_and_replay_routes(tmp_path: Path, mixture: Path, treepack: Run) -> None:
    rollouts = write_rollouts(tmp_path / ROLLOUTS, recorded())
    trie, packed = tmp_path / "trie", tmp_path / "packed"
    built = treepack("build-trie", rollouts, "--out", trie, "--keep-routes")
    assert built.status == 0
    assert "recorded for 38 tokens, with conflicts in 1 token of shared prefixes" in built.out
    assert "which adds 2 tokens" in built.out
    shared = treepack(
        "build-trie", rollouts, "--out", tmp_path / "first", "--keep-routes", "--route-conflicts", "first"
    )
    assert "which saves 2 tokens" in shared.out
    assert treepack("pack", trie, "--capacity", 64, "--out", packed).status == 0
    assert treepack("pack", trie, "--capacity", 64, "--out", packed, "--overwrite", "--method", "sequence").status == 0
    (row, *_) = read_rows(packed)
    assert row.routes is not None
    verified = treepack("train", packed, "--model", mixture, "--verify", "--device", "cpu")
    assert verified.status == 0, verified.err
    losses = {}
    for routes in ("replay", "ignore"):
        out = tmp_path / routes
        trained = treepack(
            "train", packed, "--model", mixture, "--steps", 1, "--out", out, "--routes", routes, "--device", "cpu"
        )
        assert trained.status == 0, trained.err
        losses[routes] = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert losses["replay"] != losses["ignore"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "has no routers, but the rows have recorded routes; give --routes ignore"),
        ({**EXPERTS, "num_hidden_layers": 3}, "has 3 layers and 3 routers, but the recorded routes have 2 layers"),
        ({**EXPERTS, "num_experts": 3}, "has 3 experts in a layer, but the recorded routes name expert 3"),
    ],
)
def test_a_model_without_such_experts_is_refused_before_training(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    packed = packed_directory(tmp_path / "packed", recorded(), capacity=64)
    kind = {"model_type": "qwen3_moe"} if fields else {}
    model = tiny_config(tmp_path / "config.json", "qwen3", **kind, **fields)
    with pytest.raises(TreepackError, match=message):
        open_run(packed, model, CPU)


@pytest.mark.slow
def test_two_ranks_and_compiled_or_recomputed_layers_replay_as_one_process_does(tmp_path: Path, mixture: Path) -> None:
    packed = packed_directory(tmp_path / "packed", recorded(), capacity=16)
    changes = {"epochs": 2, "rows_per_step": 3}
    cases = [
        Case("plain", packed, mixture, changes),
        Case("recomputed", packed, mixture, {**changes, "checkpoint_layers": "all"}),
        Case("pieces", packed, mixture, {**changes, "carry": 4}),
    ]
    compiled = Case("compiled", packed, mixture, {**changes, "compile": True, "checkpoint_layers": "all"})
    ignored = Case("ignored", packed, mixture, {**changes, "routes": "ignore"})
    one, two = train_over(0, tmp_path, [*cases, ignored]), train_over(2, tmp_path, [*cases, compiled])
    expected = one["plain"]["records"]
    for result in (*(one[case.name] for case in cases), *two.values()):
        for record, twin in zip(result["records"], expected, strict=True):
            assert record["loss"] == pytest.approx(twin["loss"], rel=1e-4)
            assert record["grad_norm"] == pytest.approx(twin["grad_norm"], rel=1e-3)
    assert one["ignored"]["records"][0]["loss"] != pytest.approx(expected[0]["loss"], rel=1e-3)


def test_a_step_with_own_routes_has_the_bits_of_a_step_without(tmp_path: Path, mixture: Path, treepack: Run) -> None:
    # The routes that the model itself chooses, recorded from a run of each trajectory in the same row: all bits equal.
    plain = packed_directory(tmp_path / "plain", [with_routes(each, None) for each in recorded()], capacity=64)
    run = open_run(plain, mixture, CPU)
    (batch,) = run.dataset
    choices: list[Tensor] = []
    switches = follow_routers(run.loaded.causal)
    hooks = [s.router.register_forward_hook(lambda _, __, out: choices.append(out[2])) for s in switches]
    with torch.no_grad():
        row_loss(run.loaded, batch)
    for hook in hooks:
        hook.remove()
    own = torch.stack(choices, 1).numpy().astype(np.uint8)
    paths = dict(zip(batch.trajectory_ids, batch.trajectory_ends.tolist(), strict=True))
    parent = batch.parent.tolist()
    routed = []
    for each in recorded():
        path, token = [], paths[each.trajectory_id]
        while token >= 0:
            path.append(token)
            token = parent[token]
        routed.append(with_routes(each, own[path[::-1]]))
    replayed = packed_directory(tmp_path / "replayed", routed, capacity=64)
    outputs = []
    for packed in (plain, replayed):
        out = tmp_path / f"out-{packed.name}"
        common = ["--model", mixture, "--steps", 1, "--lr", 0.01, "--device", "cpu", "--seed", 0, "--carry", 64]
        assert treepack("train", packed, "--out", out, *common).status == 0
        outputs.append(weights(out))
    first, second = outputs
    assert all(torch.equal(first[name], second[name]) for name in first)
