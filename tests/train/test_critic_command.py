"""`treepack critic`: every tree token gets the value of its path alone, once; the copy of the trie; refusals."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from support.command_line import Run
from support.oracle_model import VOCABULARY, tiny_model
from support.recorded_routes import with_routes
from support.refusal import refusal
from support.strategies import make
from support.tiny_families import tiny_family
from support.value_models import critic, plain, with_head
from treepack.attention import IMPLEMENTATIONS, register
from treepack.files.manifest import Provenance
from treepack.model.head.value_head import add_value_head, value_head_of, write_value_head
from treepack.model.loaded import LoadedModel
from treepack.pack.plan.planning import plan_rows
from treepack.train.critic import Critic, critic_values, write_values
from treepack.train.scoring_options import CriticOptions
from treepack.trajectory import Float64
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.nodes import paths
from treepack.trie.store.trie_files import read_trie, write_trie
from treepack.trie.totals import trie_totals
from treepack.trie.trie import Trie

# Token ids of rollouts, most of which share prefixes, repeat, or end inside one another.
SEQUENCES = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=8), min_size=2, max_size=6)


def trie_of(sequences: list[list[int]]) -> Trie:
    assert max(map(max, sequences)) < VOCABULARY
    spans = [[(1, len(tokens), 1.0)] if len(tokens) > 1 else [] for tokens in sequences]
    return build_trie(
        [make(f"t{i}", tokens, spans=spans[i], reward=0.0) for i, tokens in enumerate(sequences)], share="all"
    )


def values_alone(trie: Trie) -> Float64:
    """The value after each tree token, from the plain model run on each trajectory alone."""
    values, head = np.full(trie.tokens_tree, np.nan), value_head_of(plain("qwen3"))
    assert head is not None
    for path in paths(trie.end_node, trie.node_start, trie.depth):
        tokens = torch.from_numpy(trie.tokens[path].astype(np.int64))
        with torch.no_grad():
            output = plain("qwen3")(input_ids=tokens[None], use_cache=False, output_hidden_states=True)
            values[path] = (output.hidden_states[-1][0] @ head.weight[0] + head.bias[0]).numpy()
    return values


@settings(max_examples=5, deadline=None)
@given(SEQUENCES, st.sampled_from([None, 1, 4]), st.booleans(), st.sampled_from([1, 20, 500]))
def test_every_tree_token_has_the_value_of_its_path_alone(
    sequences: list[list[int]], carry: int | None, small: bool, pass_tokens: int
) -> None:
    trie = trie_of(sequences)
    capacity = int(trie.lengths.max()) if small else trie.tokens_tree
    members = plan_rows(trie, capacity=capacity, method="contiguous").members()
    computed = Critic(trie, members, critic("qwen3"), CriticOptions(carry=carry, pass_tokens=pass_tokens))
    expected, times = values_alone(trie), Counter[int]()
    for places, values in critic_values(computed):
        times.update(places.tolist())
        np.testing.assert_allclose(values, expected[places], rtol=1e-9, atol=1e-9)
    assert times.keys() == set(range(trie.tokens_tree))
    assert small or set(times.values()) == {1}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    trie = trie_of([[1, 2, 3, 4, *generator.integers(5, 9, 3 + i).tolist()] for i in range(9)])
    (tmp_path / "trie").mkdir()
    write_trie(trie, tmp_path / "trie", Provenance(totals=trie_totals(trie)))
    return tmp_path / "trie"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    causal = tiny_model("qwen3", dtype=torch.float32)
    causal.save_pretrained(tmp_path / "model")
    write_value_head(add_value_head(causal, (), random=3), tmp_path / "model")
    return tmp_path / "model"


def test_the_command_writes_a_copy_of_the_trie_with_values(
    treepack: Run, directory: Path, model: Path, tmp_path: Path
) -> None:
    common = ("--model", model, "--device", "cpu")
    for name, options in (("whole", ()), ("small", ("--capacity", 16)), ("pieces", ("--carry", 8))):
        done = treepack("critic", directory, *common, *options, "--out", tmp_path / name)
        assert done.status == 0, done.err
    whole, small, pieces = (read_trie(tmp_path / name, token_values=True) for name in ("whole", "small", "pieces"))
    before = read_trie(directory)
    assert whole.token_values is not None
    assert whole.token_values.std() > 0
    assert (whole.tokens == before.tokens).all()
    assert whole.trajectories.equals(before.trajectories)
    for other in (small, pieces):
        assert other.token_values is not None
        np.testing.assert_allclose(other.token_values, whole.token_values, rtol=1e-4, atol=1e-5)
    record = json.loads((tmp_path / "pieces" / "manifest.json").read_text())["critic"]
    assert record == {"model": str(model), "dtype": "fp32", "attention": "reference", "carry": 8}
    assert treepack("stats", tmp_path / "whole", "--check").status == 0
    done = treepack("critic", tmp_path / "whole", *common, "--out", tmp_path / "again")
    assert "are replaced" in done.err
    for path in (tmp_path / "whole").glob("*.parquet"):
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def test_rows_that_repeat_prefixes_count_their_tokens(directory: Path, model: Path, tmp_path: Path) -> None:
    options = CriticOptions(device="cpu", capacity=16)
    summary = write_values(directory, str(model), tmp_path / "out", options)
    assert summary.num_rows > 1
    assert summary.num_computed > len(summary.values)
    summary = write_values(directory, str(model), tmp_path / "all", CriticOptions(device="cpu", carry=8))
    assert (summary.num_rows, summary.num_computed) == (1, len(summary.values))


def test_a_model_without_a_head_and_options_that_exclude_each_other_are_refused(
    treepack: Run, directory: Path, model: Path, tmp_path: Path
) -> None:
    done = treepack("critic", directory, "--model", model, "--capacity", 4, "--device", "cpu", "--out", tmp_path / "a")
    assert done.status == 1
    assert not (tmp_path / "a").exists()
    done = treepack("critic", directory, "--model", model, "--capacity", 64, "--carry", 8, "--out", tmp_path / "a")
    assert done.err.splitlines()[-1].endswith("with carry each tree is one row; give one of them")
    (model / "value_head.safetensors").unlink()
    done = treepack("critic", directory, "--model", model, "--device", "cpu", "--out", tmp_path / "a")
    assert (done.status, "has no value_head.safetensors, so it is not a critic" in done.err) == (1, True)


def test_recorded_experts_are_replayed_and_a_model_without_routers_refuses_them() -> None:
    rng = np.random.default_rng(0)
    of_prefix: dict[tuple[int, ...], NDArray[np.uint8]] = {}
    token_ids = [(1, 2, 3, 4), (1, 2, 5), (1, 6, 2, 3)]
    trajectories = []
    for number, path in enumerate(token_ids):
        # Routes of shared tokens are equal.
        rows = [
            of_prefix.setdefault(path[:end], rng.random((2, 4)).argsort(-1)[:, :2].astype(np.uint8))
            for end in range(1, len(path) + 1)
        ]
        trajectories.append(with_routes(make(f"t{number}", list(path), reward=0.0), np.array(rows)))
    register()
    mixture = with_head(tiny_family("qwen3_moe", attention=IMPLEMENTATIONS["reference"], norm_topk_prob=True))
    loaded = LoadedModel(mixture, "mixture", "reference", ())

    def values(trie: Trie, routes: str, carry: int | None = None) -> Float64:
        assert trie.routes is not None
        members = plan_rows(trie, capacity=64, method="contiguous").members()
        computed = np.full(trie.tokens_tree, np.nan)
        for places, own in critic_values(Critic(trie, members, loaded, CriticOptions(carry=carry, routes=routes))):
            computed[places] = own
        return computed

    trie = build_trie(trajectories, share="all")
    together = values(trie, "replay")
    for tokens, each in zip(paths(trie.end_node, trie.node_start, trie.depth), trajectories, strict=True):
        alone = values(build_trie([each]), "replay")
        np.testing.assert_allclose(together[tokens], alone, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(values(trie, "replay", carry=3), together, rtol=1e-9, atol=1e-9)
    assert np.abs(values(trie, "ignore") - together).max() > 1e-3
    batch = Critic(trie, [np.arange(3)], critic("qwen3"), CriticOptions())
    assert "routes ignore" in refusal(next, critic_values(batch))
