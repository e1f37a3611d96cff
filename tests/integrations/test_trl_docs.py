"""The programs for TRL of docs/your-trainer.md run, and each has at most 20 lines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from support.oracle_model import write_rows
from support.packed_objectives import as_trajectories, rollouts
from support.paths import ROOT

pytestmark = pytest.mark.integrations


def programs() -> list[str]:
    page = (ROOT / "docs" / "your-trainer.md").read_text()
    section = page.split("## TRL's own loops")[1].split("\n## ")[0]
    return re.findall(r"^```py\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that the programs use: a model, data and a reward."""
    from support import trl_runs as runs

    monkeypatch.chdir(tmp_path)
    model = runs.tiny_model(tmp_path / "model")
    runs.tokenizer().save_pretrained(model)
    pair = {"prompt": "a tree", "chosen": " of tokens", "rejected": " of words"}
    return {
        "model": model,
        "tokenizer": runs.tokenizer(),
        "prompts": runs.prompts(1),
        "pairs": runs.Dataset.from_list([pair] * 8),
        "reward": runs.reward,
    }


def test_there_are_four_short_programs() -> None:
    assert [len(program.splitlines()) <= 20 for program in programs()] == [True] * 4


@pytest.mark.parametrize("number", [0, 1, 2], ids=["GRPO", "DPO", "SFT"])
def test_a_program_trains(number: int, names: dict[str, Any], tmp_path: Path) -> None:
    write_rows(tmp_path / "packed", as_trajectories(rollouts()), list(range(len(rollouts()))))
    # bfloat16, the default of TRL, needs use_cpu on a machine without a GPU.
    program = programs()[number].replace('Config("out"', 'Config("out", use_cpu=True, max_steps=1')
    exec(compile(program, "docs/your-trainer.md", "exec"), names)
    assert names["trainer"].state.global_step == 1


def test_the_planners_take_the_place_of_those_of_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.experimental.async_grpo import async_grpo_trainer

    name = "TokenBudgetBatcher"
    monkeypatch.setattr(async_grpo_trainer, name, getattr(async_grpo_trainer, name))  # restored after the test
    assert name in async_grpo_trainer.AsyncGRPOTrainer.get_train_dataloader.__code__.co_names
    # The trainer itself needs a server of vLLM.
    exec(programs()[3].split("trainer = ")[0], {})
    assert async_grpo_trainer.TokenBudgetBatcher.__name__ == "TreePlanner"
