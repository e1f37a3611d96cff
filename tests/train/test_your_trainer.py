"""The programs of docs/your-trainer.md run unchanged, and every gradient equals that of trajectories one by one."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM

from support.oracle_model import gradients, keep_norms, worst_error, write_rows
from support.oracle_objectives import Rollout, own_logprobs, step_loss
from support.packed_objectives import as_trajectories, rollouts
from support.paths import ROOT
from treepack.data.dataset import PackedDataset
from treepack.model.load import load_model
from treepack.objectives.objective import choose_objective

ROWS = [0, 0, 1, 1, 2, 2, 3, 3, 4, 5]  # the row of every rollout
PER_STEP = 4  # six rows: the second step of an epoch has two


def programs() -> list[str]:
    page = (ROOT / "docs" / "your-trainer.md").read_text().split("\n## The commands in Python\n")[0]
    return re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


class Recorder:
    """A record of a program: the rows that it read, and weights and unclipped gradients of every update."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.unclipped: dict[int, Tensor] = {}
        self.updates: list[dict[int, tuple[Tensor, Tensor]]] = []

    def update(self, optimiser: Any, *_: object) -> None:
        parameters = [p for group in optimiser.param_groups for p in group["params"]]
        assert all(p.grad is not None for p in parameters)
        # By id(parameter), because the optimiser has no names.
        self.updates.append(
            {id(p): (p.detach().clone(), self.unclipped.get(id(p), p.grad).clone()) for p in parameters}
        )
        self.unclipped = {}

    def steps(self) -> Iterator[tuple[list[int], dict[int, tuple[Tensor, Tensor]]]]:
        """Return rows and update of each step; an epoch has six rows."""
        epochs = [self.rows[i : i + 6] for i in range(0, len(self.rows), 6)]
        # rows 3 1 0 5 2 4 -> steps 3 1 0 5 and 2 4
        cut = [epoch[i : i + PER_STEP] for epoch in epochs for i in range(0, len(epoch), PER_STEP)]
        return zip(cut, self.updates, strict=True)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with data and a model, in which the programs run."""
    write_rows(tmp_path / "packed", as_trajectories(rollouts()), ROWS)
    (tmp_path / "sample_data").symlink_to(ROOT / "sample_data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def record(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """A record of what the programs do."""
    recorder, read = Recorder(), PackedDataset.__getitem__

    def reading(dataset: PackedDataset, index: int) -> Any:
        recorder.rows.append(index)
        return read(dataset, index)

    clip = torch.nn.utils.clip_grad_norm_

    def clipping(parameters: Any, *arguments: Any, **options: Any) -> Tensor:
        listed = list(parameters)  # may be a generator, which can be read once
        recorder.unclipped = {id(p): p.grad.clone() for p in listed}
        return clip(listed, *arguments, **options)

    monkeypatch.setattr(PackedDataset, "__getitem__", reading)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clipping)
    hook = register_optimizer_step_pre_hook(recorder.update)
    yield recorder
    hook.remove()


def supervised(model: Any, chosen: Sequence[Rollout]) -> Tensor:
    """Return the weighted mean of nll over the trained tokens of all `chosen` rollouts."""
    total: Any = 0
    for rollout in chosen:
        logprobs, _ = own_logprobs(model, rollout)
        total = total - rollout.weight * sum(rollout.weights[j] * logprobs[j] for j in rollout.trained)
    mean: Tensor = total / sum(rollout.weight * sum(rollout.weights) for rollout in chosen)
    return mean


def policy(model: Any, chosen: Sequence[Rollout]) -> Tensor:
    return step_loss(model, chosen, choose_objective("dapo"))


def assert_exact(model: Any, record: Recorder, loss: Callable[[Any, Sequence[Rollout]], Tensor]) -> None:
    """Check that the gradient of every update is that of `loss` over its rollouts, each alone, at its weights."""
    for rows, update in record.steps():
        pairs = {name: update[id(p)] for name, p in model.named_parameters()}
        chosen = [rollout for row, rollout in zip(ROWS, rollouts(), strict=True) if row in rows]
        assert_gradient(model.config, pairs, lambda plain, chosen=chosen: loss(plain, chosen))  # type: ignore[misc]


def assert_gradient(config: Any, pairs: dict[str, tuple[Tensor, Tensor]], loss: Callable[[Any], Tensor]) -> None:
    """Check that the gradient of each (weight, gradient) pair is that of `loss`, computed in float64.

    The programs compute in float32: rounding changes a gradient by about 1e-6, and a token counted wrongly by 1e-2.
    """
    plain = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation="sdpa", dtype=torch.float64)
    keep_norms(plain)
    plain.load_state_dict({name: weight for name, (weight, _) in pairs.items()}, strict=False)
    plain.tie_weights()
    torch.autograd.backward(loss(plain))
    assert worst_error({name: raw.double().cpu() for name, (_, raw) in pairs.items()}, gradients(plain)) < 1e-4


def run(program: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(program, "docs/your-trainer.md", "exec"), names)
    return names


def test_there_are_four_programs() -> None:
    assert len(programs()) == 4


def test_the_loop_in_pytorch(record: Recorder) -> None:
    names = run(programs()[0])
    assert len(record.updates) == 4
    assert sorted(record.rows[:6]) == sorted(record.rows[6:]) == list(range(6))
    assert_exact(names["loaded"].model, record, supervised)


def test_the_loop_in_pytorch_goes_on_where_it_was_killed(record: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    program = programs()[0]
    whole = run(program)["loaded"].model.state_dict()
    rows, record.rows[:] = list(record.rows), []
    Path("state.pt").unlink()
    saves, save = [0], torch.save

    def save_and_die(*arguments: Any) -> None:
        save(*arguments)
        saves[0] += 1
        if saves[0] == 1:  # after the first file is whole; the resumed program saves again
            raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        run(program)
    again = run(program)["loaded"].model.state_dict()
    assert record.rows == rows
    assert all(torch.equal(again[name], weight) for name, weight in whole.items())


def test_the_trainer_of_transformers(record: Recorder) -> None:
    pytest.importorskip("accelerate")
    names = run(programs()[1])
    assert len(record.updates) == 2
    assert_exact(names["model"], record, supervised)


def test_the_policy_loss_in_trl(record: Recorder) -> None:
    pytest.importorskip("trl")
    names = run(programs()[2])
    assert len(record.updates) == 2
    assert_exact(names["trainer"].model, record, policy)


@pytest.mark.parametrize("size", ["8192", pytest.param("3", marks=pytest.mark.slow)])
def test_the_loop_in_pieces(record: Recorder, size: str) -> None:
    program, changed = re.subn("8192", size, programs()[3])
    assert changed == 1
    names = run(program)
    assert len(record.updates) == 4
    assert_exact(names["loaded"].model, record, supervised)


# Runs both programs in every process, because imports take longest, and saves weights and gradients of their updates.
BOTH = """
import os, torch
from pathlib import Path
from torch.optim.optimizer import register_optimizer_step_pre_hook
seen = []
register_optimizer_step_pre_hook(lambda o, *_: seen.append(
    {id(p): (p.detach().clone(), p.grad.clone()) for group in o.param_groups for p in group["params"]}))
for number in (1, 2):
    names = {}
    exec(compile(Path(f"program{number}.py").read_text(), f"program{number}.py", "exec"), names)
    update = seen.pop()
    assert not seen
    pairs = {name: update[id(p)] for name, p in names["trainer"].model.named_parameters()}
    torch.save(pairs, f"program{number}-rank{os.environ['RANK']}.pt")
"""


@pytest.mark.slow
def test_two_processes_compute_one_step(workplace: Path) -> None:
    pytest.importorskip("trl")
    one_row = "per_device_train_batch_size=1, gradient_accumulation_steps=3, use_cpu=True, max_grad_norm=0.0"
    settings = r"per_device_train_batch_size=\d, gradient_accumulation_steps=\d"
    for number in (1, 2):
        program, changed = re.subn(settings, one_row, programs()[number])
        assert changed == 1
        Path(f"program{number}.py").write_text(program)
    Path("both.py").write_text(BOTH)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "both.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    config = load_model("sample_data/tiny-qwen3.json").model.config
    losses: dict[int, Callable[[Any, Sequence[Rollout]], Tensor]] = {1: supervised, 2: policy}
    for number, loss in losses.items():
        for rank in range(2):
            pairs = torch.load(f"program{number}-rank{rank}.pt")
            assert_gradient(config, pairs, lambda plain, loss=loss: loss(plain, rollouts()))  # type: ignore[misc]
