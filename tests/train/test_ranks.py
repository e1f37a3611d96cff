"""Several ranks: losses and gradients equal the results of one process, with sharding, offloading and padding."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from support.oracle_model import packed_directory, tiny_config
from support.passes import rows_alone
from support.rank_processes import Case, assert_same_steps, train_over
from support.strategies import make
from support.torchrun import free_port
from treepack.errors import TreepackError
from treepack.model.weights.files import weight_files
from treepack.train import ranks as joining
from treepack.train.passes import deal
from treepack.train.ranks import Ranks, join_ranks
from treepack.trajectory import Trajectory


def rollouts() -> list[Trajectory]:
    """Return trajectories in groups of three that share a prompt, with rewards, advantages and unequal weights."""
    generator = np.random.default_rng(0)
    trajectories = []
    for i in range(12):
        prompt = [i // 3, *range(10, 12 + 2 * (i // 3))]  # 3, 5, 7 and 9 tokens: rows differ in length
        tokens = [*prompt, 5, *generator.integers(20, 24, 4 + i).tolist()]
        spans = [(len(prompt), len(tokens), 1.0 + i % 2)]
        trajectories.append(
            make(f"t{i}", tokens, spans=spans, group=f"g{i // 3}", reward=float(i % 3), advantage=float(i % 3 - 1))
        )
    return trajectories


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return packed_directory(tmp_path / "packed", rollouts(), capacity=40)


def assert_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that all metrics, the gradients of the last step and the weights are equal except for float32 rounding."""
    assert len(expected["records"]) > 1
    assert_same_steps(result, expected)
    actual, reference = (AutoModelForCausalLM.from_pretrained(each["out"]).state_dict() for each in (result, expected))
    assert actual.keys() == reference.keys()
    for name, weight in reference.items():
        torch.testing.assert_close(actual[name], weight, rtol=1e-3, atol=2e-5)


@pytest.mark.slow
def test_two_ranks_train_as_one_process_does(packed: Path) -> None:
    folder = packed.parent
    tied = tiny_config(folder / "tied.json", tie_word_embeddings=True)
    untied = tiny_config(folder / "untied.json", tie_word_embeddings=False)
    uneven = {"epochs": 2, "rows_per_step": 3}  # the second rank runs out of rows
    cases = [
        Case("tied", packed, tied, {"epochs": 2}),
        Case("joined", packed, tied, {"epochs": 2, "pass_tokens": 80}),
        Case("untied", packed, untied, uneven),
        Case("offloaded", packed, tied, {"epochs": 2, "offload_optimizer": True}),
        Case("compiled", packed, untied, {"epochs": 2, "compile": True, "checkpoint_layers": "all"}),
        Case("grpo", packed, untied, uneven | {"pass_tokens": 80}, "grpo"),
        Case("gspo", packed, tied, uneven, "gspo"),
    ]
    results, expected = (train_over(size, folder, cases) for size in (2, 0))  # 0: this process, without a group
    for case in cases:
        assert_same(results[case.name], expected[case.name])
    for name, gradient in results["tied"]["gradients"].items():
        assert torch.equal(results["offloaded"]["gradients"][name], gradient), "moments in host memory change no bit"
    graphs = [record["graphs"] for record in results["compiled"]["records"]]
    assert graphs[0] == expected["compiled"]["records"][0]["graphs"] > 0, "sharding compiles nothing more"
    assert set(graphs) == {graphs[0]}, "rows of other lengths compile nothing more"


def test_a_single_file_is_read_and_an_index_in_the_same_directory_is_not(tmp_path: Path) -> None:
    config = json.loads(tiny_config(tmp_path / "model.json").read_text())
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    model.save_pretrained(tmp_path / "source", max_shard_size="8KB")
    model.save_pretrained(tmp_path / "single")
    (tmp_path / "single" / "model.safetensors").rename(tmp_path / "source" / "model.safetensors")
    files = weight_files(tmp_path / "source")
    assert files is not None
    assert {path.name for path in files.values()} == {"model.safetensors"}


@given(costs=st.lists(st.floats(0.1, 100), min_size=1, max_size=30), size=st.integers(1, 5))
def test_rows_are_dealt_once_in_equally_many_micro_batches(costs: list[float], size: int) -> None:
    rows = list(range(len(costs)))
    shares = deal(rows, np.array(costs), size, rows_alone(len(rows)))
    assert len(shares) == size
    assert {len(share) for share in shares} == {-(-len(rows) // size)}
    assert sorted(row for share in shares for own in share for row in own) == rows
    # A micro-batch takes as long as its most expensive row. With costs in descending order, every size-th row starts a
    # micro-batch, and no distribution has a smaller sum.
    durations = [max(costs[row] for own in batch for row in own) for batch in zip(*shares, strict=True)]
    assert sum(durations) == pytest.approx(sum(sorted(costs, reverse=True)[::size]))


def test_the_most_expensive_row_goes_to_the_rank_with_the_smallest_sum() -> None:
    # Order of rows by cost: 0 3 2 1 4. Sums after the first micro-batch 9 and 8, after the second 13 and 13.
    shares = deal([0, 1, 2, 3, 4], np.array([9.0, 4.0, 5.0, 8.0, 2.0]), 2, rows_alone(5))
    assert shares == [[(0,), (1,), (4,)], [(3,), (2,), ()]]


def test_ranks_with_other_options_are_refused(packed: Path, tmp_path: Path) -> None:
    case = Case("run", packed, tiny_config(tmp_path / "tiny.json"), {"steps": 1}, differences={"lr": 2e-2})
    with pytest.raises(Exception, match=r"this is not one run, because .* differ"):
        train_over(2, tmp_path, [case])
    assert not (tmp_path / "2" / "run").exists()


class _Second(Ranks):
    """The second of two ranks, whose first one has a learning rate of 1."""

    def lead(self, function: Any) -> Any:
        return {**function(), "lr": 1}

    def any(self, flag: bool) -> bool:
        return flag


def test_a_rank_names_what_it_has_of_its_own() -> None:
    message = "this is not one run, because rank 1 and rank 0 differ: lr is 2 and 1; start all ranks with the same "
    with pytest.raises(TreepackError, match=message):
        _Second(1, 2).require_same({"seed": 0, "lr": 2})
    _Second(1, 2).require_same({"seed": 0, "lr": 1})


@pytest.mark.parametrize(
    ("rank", "complaint"),
    [
        (0, r"2 of 3 ranks did not come within .*: rank 1, 2; look"),
        (1, "cannot connect .*; look for an error of rank 0"),
    ],
)
def test_a_rank_waits_a_limited_time_for_ranks_that_do_not_come(
    rank: int, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_JOIN_TIME", timedelta(seconds=1))
    place = {"RANK": rank, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(TreepackError, match=complaint):
        join_ranks(torch.device("cpu"))
    assert not torch.distributed.is_initialized()
