"""The benchmark of hybrid models: its rows and parts, and a dry run on the CPU."""

from __future__ import annotations

from pathlib import Path

import hybrid_step
import pytest
import torch
from training_rows import count_work, flat_rows, load_rows, save_rows, tree_rows
from workloads import star

import support.interpreter  # noqa: F401
from support.oracle_model import packed_directory
from support.strategies import make
from treepack.data.dataset import PackedDataset
from treepack.recurrent.kernels import convolution, states


def test_rows_of_a_file_are_those_of_the_packed_directory(tmp_path: Path) -> None:
    samples = [make("a", [1, 2, 3, 4]), make("b", [1, 2, 5]), make("c", [6, 7], spans=[(1, 2, 0.5)])]
    packed = packed_directory(tmp_path / "packed", samples, capacity=16)
    assert save_rows(packed, 1, tmp_path / "rows.npz") == [0]
    (found,), expected = load_rows(tmp_path / "rows.npz"), PackedDataset(packed)[0]
    for name in ("input_ids", "position_ids", "parent", "scale", "subtree_end", "trajectory_ends"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert torch.equal(found.loss_weight > 0, expected.loss_weight > 0)


def test_sequences_of_a_tree_have_the_pairs_and_targets_of_its_paths() -> None:
    rows = tree_rows(star("star", 5, 3, 4), 10)
    work = count_work(flat_rows(rows, 20))
    assert (work.tokens, work.pairs, work.targets) == (27, 3 * 45, 3 * 8)
    tree = count_work(rows)
    assert (tree.tokens, tree.pairs, tree.targets) == (17, 15 + 3 * (6 + 7 + 8 + 9), 16)


def test_every_kernel_of_the_room_belongs_to_the_recurrent_part() -> None:
    names = hybrid_step.kernel_names("treepack.recurrent")
    own = {name for module in (convolution, states) for name in vars(module) if name.endswith("_kernel")}
    assert len(own) >= 6
    assert {hybrid_step.part_of(name, names, {"_forward_kernel"}) for name in own} == {"recurrent"}


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("_query_kernel", "attention"),
        ("void flash_bwd_dq_dk_dv_loop_kernel<...>", "attention"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "products"),
        ("triton_poi_fused_add_mul_0", "other"),
    ],
)
def test_other_kernels_belong_to_other_parts(kernel: str, part: str) -> None:
    assert hybrid_step.part_of(kernel, {"_convolution_kernel"}, {"_query_kernel"}) == part


@pytest.mark.slow
def test_a_dry_run_of_steps_has_equal_gradients_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    hybrid_step.main(["--dry-run"])  # raises if losses or gradients differ
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| star | 44 / 64 |")]
    assert len(rows) == 1
