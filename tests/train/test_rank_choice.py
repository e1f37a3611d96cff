"""The number of ranks that share a row or divide experts, by a table of cases and by configurations of models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.oracle_model import packed_directory, tiny_config
from support.rank_processes import Case, train_over
from support.refusal import refusal
from support.simulated_device import ScriptedMemory
from support.strategies import make
from treepack.costs.presets import PRESETS
from treepack.memory.model_memory import ModelMemory, count_weights, memory_of
from treepack.model.adapters.adapter import save_adapter
from treepack.model.adapters.lora_options import LoraOptions
from treepack.model.load import load_model
from treepack.objectives.objective import choose_objective
from treepack.train.options import TrainOptions
from treepack.train.ranks import Ranks
from treepack.train.saving.choices import with_recorded
from treepack.train.setup.rank_choice import RankNeeds, choose_division, choose_ranks, rank_needs
from treepack.train.setup.run_data import open_data

GB = 10**9
USUAL: dict[str, Any] = {"sequence_ranks": 1, "expert_ranks": 1}


def needs(**changes: Any) -> RankNeeds:
    """Return needs in units of 1 GB for 8 ranks: a state of 80, rows of 1 for each 1,000 tokens, pieces of 60."""
    usual: dict[str, Any] = {
        "state": 80 * GB,
        "held": 10 * GB,
        "gathered": 4 * GB,
        "experts": 0,
        "whole": 60 * GB,
        "row": lambda tokens: tokens * GB // 1000,
        "longest": 20_000,
        "usual": 20_000,
        "rows": 8,
        "sequences": (1, 2, 4, 8),
    }
    return RankNeeds(**(usual | changes))


@pytest.mark.parametrize(
    ("changes", "expected", "line"),
    [
        ({}, {}, ""),
        # 90 of 100 GB may be used, 76 beside weights.
        ({"longest": 76_000, "whole": None}, {}, ""),
        (
            {"longest": 77_000, "whole": None},
            {"sequence_ranks": 2},
            "sequence-ranks 2: a row of 77,000 tokens needs 71.7 GiB on one GPU, of which 70.8 GiB is free",
        ),
        ({"longest": 200_000, "whole": None}, {"sequence_ranks": 4}, "sequence-ranks 4: a row of 200,000 tokens"),
        ({"longest": 900_000, "whole": None}, {"sequence_ranks": 8}, "sequence-ranks 8: a row of 900,000 tokens"),
        ({"longest": 900_000, "whole": None, "sequences": (1, 2)}, {"sequence_ranks": 2}, "sequence-ranks 2"),
        # Rows in pieces fit, if the whole weights do.
        ({"longest": 200_000}, {}, ""),
        ({"longest": 200_000, "whole": 80 * GB}, {"sequence_ranks": 4}, "sequence-ranks 4: a row of 200,000 tokens"),
        # Idle ranks.
        ({"rows": 4}, {"sequence_ranks": 2}, "sequence-ranks 2: a step has 4 rows for 8 ranks"),
        ({"rows": 3}, {"sequence_ranks": 4}, "sequence-ranks 4: a step has 3 rows for 8 ranks"),
        ({"rows": 1}, {"sequence_ranks": 8}, "sequence-ranks 8: a step has 1 rows for 8 ranks"),
        ({"rows": 1, "sequences": (1, 2)}, {"sequence_ranks": 2}, "sequence-ranks 2: a step has 1 rows for 8 ranks"),
        ({"rows": 1, "usual": 5_000}, {}, ""),
        ({"rows": 1, "sequences": (1,)}, {}, ""),
        # Experts that do not fit beside the share of a rank.
        (
            {"gathered": 90 * GB, "experts": 88 * GB, "divisions": (8, 4, 2)},
            {"expert_ranks": 8},
            "expert-ranks 8: experts of two layers have 82.0 GiB, which do not fit on a GPU beside its share",
        ),
        # With 4 expert ranks, 4 ranks have the whole state: 20 GB each.
        ({"gathered": 90 * GB, "experts": 88 * GB, "divisions": (4, 2)}, {"expert_ranks": 4}, "expert-ranks 4"),
        # Tensors that may wait in host memory: inputs of layers, of 0.4 GB for each 1,000 tokens, and moments.
        ({"longest": 120_000, "whole": None, "inputs": 400_000}, {}, ""),
        (
            {"longest": 130_000, "whole": None, "inputs": 400_000},
            {"sequence_ranks": 2},
            "sequence-ranks 2: a row of 130,000 tokens needs 72.6 GiB on one GPU, of which 70.8 GiB is free",
        ),
        ({"longest": 77_000, "whole": None, "moments": 5 * GB}, {}, ""),
        ({"held": 100 * GB, "state": 800 * GB, "moments": 50 * GB}, {}, ""),
        # The host has 200 GB: enough for the moments, or for the inputs of 77,000 tokens, but not for more.
        (
            {"longest": 77_000, "whole": None, "inputs": 3 * 10**6},
            {"sequence_ranks": 2},
            "sequence-ranks 2: a row of 77,000 tokens needs 71.7 GiB",
        ),
        # Weights that do not fit.
        ({"held": 100 * GB, "state": 800 * GB}, {}, ""),
        # Every rank has the whole teacher: of 100 GB, 40 are for the run, 36 may be used, 22 beside weights.
        ({"longest": 22_000, "whole": None, "teacher": 60 * GB}, {}, ""),
        (
            {"longest": 23_000, "whole": None, "teacher": 60 * GB},
            {"sequence_ranks": 2},
            "sequence-ranks 2: a row of 23,000 tokens needs 21.4 GiB on one GPU, of which 20.5 GiB is free",
        ),
    ],
)
def test_only_a_run_that_would_be_refused_or_idle_is_divided_otherwise(
    changes: dict[str, Any], expected: dict[str, Any], line: str
) -> None:
    values, lines = choose_division(needs(**changes), 8, free=100 * GB, host=200 * GB)
    assert values == USUAL | expected
    assert "\n".join(lines).startswith(line)
    assert bool(lines) == bool(line)


def test_a_given_number_of_ranks_is_kept_without_a_line() -> None:
    given = needs(sequences=(2,), longest=900_000, whole=None)
    assert choose_division(given, 8, free=100 * GB, host=0) == (USUAL | {"sequence_ranks": 2}, ())


@pytest.mark.parametrize("name", ["qwen3-1.7b", "qwen3-8b", "llama-3.1-70b", "qwen3-30b-a3b"])
def test_weights_of_an_estimate_are_those_of_its_parts(name: str) -> None:
    counts, memory = count_weights(PRESETS[name], name=name), memory_of(PRESETS[name], name=name)
    assert isinstance(memory, ModelMemory)
    assert memory.state == 16 * counts.total
    assert counts.total == pytest.approx(counts.ends + memory.num_layers * counts.layer, rel=1e-6)
    # 128 experts, each with three matrices of 2,048 x 768.
    assert counts.experts == (128 * 3 * 2048 * 768 if "a3b" in name else 0)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    rollouts = [make(f"t{i}", [i, *range(6, 24), *range(6, 20 + i)]) for i in range(4)]
    return packed_directory(tmp_path / "packed", rollouts, capacity=40)


def test_needs_follow_the_configuration_and_the_options(packed: Path, tmp_path: Path) -> None:
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = tiny_config(tmp_path / "m.json", "qwen3", **experts, model_type="qwen3_moe", num_attention_heads=4)
    options, ranks = TrainOptions(device="cpu", rows_per_step=1), Ranks(0, 8, machines=2)
    data = open_data(packed, options, Ranks())
    found = rank_needs(config, options, data, ranks)
    assert found.held == found.state // 8 > 0
    assert list(found.sequences) == [1, 2, 4]  # of the four ranks of a machine
    assert list(found.divisions) == [2]  # of 6 experts
    assert (found.rows, found.longest) == (1, int(data.dataset.num_tokens.max()))
    assert found.moments == found.held // 2  # 8 of 16 bytes
    assert found.inputs == 4 * 16 * 2  # two layers
    assert rank_needs(config, replace(options, offload_optimizer=True), data, ranks).moments == found.moments
    kept = rank_needs(config, replace(options, offload_optimizer=False, offload_checkpoints=False), data, ranks)
    assert (kept.moments, kept.inputs) == (0, 0)
    assert found.row(2000) - found.row(1000) == found.row(1000) - found.row(0) > 0
    given = rank_needs(config, replace(options, sequence_ranks=2, expert_ranks=2, carry=None), data, ranks)
    assert (list(given.sequences), given.held, given.whole) == ([2], found.state // 2, None)
    unknown = tiny_config(tmp_path / "u.json", "qwen3", num_attention_heads=4, hidden_act="silu")
    assert rank_needs(unknown, options, data, ranks).divisions == ()


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp32", 4)])
def test_needs_count_a_teacher_with_its_states_of_a_row(packed: Path, tmp_path: Path, dtype: str, size: int) -> None:
    student, teacher = (tiny_config(tmp_path / f"{width}.json", hidden_size=width) for width in (16, 24))
    loaded = load_model(teacher).causal
    weights = sum(each.weight.numel() for each in loaded.modules() if isinstance(each, nn.Linear | nn.Embedding))
    data = open_data(packed, TrainOptions(device="cpu"), Ranks())

    def counted(source: Path, **loss: Any) -> int:
        objective = choose_objective(**loss, teacher=str(source))
        options = TrainOptions(device="cpu", dtype=dtype, objective=objective)
        return rank_needs(student, options, data, Ranks(0, 2)).teacher

    assert counted(teacher, name="opd") == size * weights
    assert counted(teacher, name="distill") == size * (weights + 24 * data.longest_row)
    adapter = tmp_path / "adapter"
    save_adapter(load_model(teacher, lora=LoraOptions(rank=2)).model, adapter, None)
    assert counted(adapter, name="opd") == size * weights
    assert rank_needs(student, TrainOptions(device="cpu"), data, Ranks(0, 2)).teacher == 0


def test_one_process_and_a_cpu_choose_nothing(packed: Path, tmp_path: Path) -> None:
    options = TrainOptions(device="cpu")
    data, meter = open_data(packed, options, Ranks()), ScriptedMemory((0,), 1.0, 1.0).meter(0)
    for ranks, device in ((Ranks(), meter), (Ranks(0, 2), None)):
        chosen = choose_ranks(tmp_path / "no model is read", options, data, ranks, device)
        assert chosen == (replace(options, **USUAL), ())


@pytest.mark.parametrize("name", ["sequence_ranks", "expert_ranks"])
def test_bad_numbers_of_ranks_are_refused(name: str) -> None:
    changes: dict[str, Any] = {name: 0}
    assert refusal(TrainOptions, **changes) == f"{name} is 0; expected a number of ranks of at least 1, or auto"


@pytest.mark.slow
def test_ranks_share_rows_that_do_not_fit_on_one(packed: Path, tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "tiny.json")
    steps = {"steps": 2, "rows_per_step": 2, "compile": False, "carry": None, "loss_chunk": 64}
    options = TrainOptions(device="cpu", carry=None)
    found = rank_needs(config, options, open_data(packed, options, Ranks()), Ranks(0, 2))
    away = found.moments + found.inputs * found.longest  # to host memory
    too_little = int((found.held + found.gathered + found.row(found.longest) - away - 100) / 0.9)
    memory = ScriptedMemory((GB, too_little), kept=1.0, recomputed=0.5)
    divided = Case("divided", packed, config, steps, memory=memory)
    shared = train_over(2, tmp_path, [divided])["divided"]
    alone = train_over(0, tmp_path, [replace(divided, memory=None)])["divided"]
    (line,) = (note for note in shared["notes"] if note.startswith("sequence-ranks"))
    assert line.startswith(f"sequence-ranks 2: a row of {found.longest} tokens needs")
    chosen = json.loads((shared["out"] / "run.json").read_text())["chosen"]
    assert {name: chosen[name] for name in (*USUAL, "ranks")} == USUAL | {"sequence_ranks": 2, "ranks": 2}
    assert chosen["why"][0] == line
    for number, again in ((2, 2), (4, "auto")):  # only as many ranks take the choice again
        ranks = Ranks(0, number)
        assert with_recorded(TrainOptions(device="cpu"), shared["out"], ranks).sequence_ranks == again
    for first, second in zip(shared["records"], alone["records"], strict=True):
        assert first["loss"] == pytest.approx(second["loss"], rel=2e-5)
    for name, gradient in alone["gradients"].items():
        torch.testing.assert_close(shared["gradients"][name], gradient, rtol=1e-4, atol=1e-6)
