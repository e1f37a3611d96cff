"""Checkpoints: a resumed run equals an uninterrupted run, and a process that dies loses at most one save."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.checkpoint_processes import (
    filled,
    in_processes,
    one_rank_without_space,
    ranks_that_look,
    reshard,
    save_forever,
    save_in_little_space,
    save_new,
    save_until,
    snapshot,
    start,
    tiny,
    train,
    update,
)
from support.refusal import refusal
from treepack.errors import TreepackError
from treepack.train.saving.checkpoint import Checkpoints, latest, restore
from treepack.train.saving.checkpoint_tensors import read_layout
from treepack.train.saving.state import SavedCheckpoint


def save(directory: Path, *steps: int, keep: int = 2) -> Path:
    """Save checkpoints of `steps`, in which every weight has the value of the step; return the path of the last."""
    checkpoints = Checkpoints(directory, keep=keep)
    for step in steps:
        checkpoints.save(step, *filled(step), {"step": step})
    checkpoints.close()
    return directory / f"step-{steps[-1]:08d}"


def restore_latest(directory: Path) -> SavedCheckpoint:
    """Return the latest checkpoint, after restoring it and checking that every weight has the value of its step."""
    checkpoint, _ = latest(directory)
    assert checkpoint is not None
    model, optimiser = filled(-1)
    assert restore(checkpoint, model, optimiser) == {"step": checkpoint.step}
    assert all(bool((parameter == checkpoint.step).all()) for parameter in model.parameters())
    return checkpoint


def leftovers(directory: Path) -> list[str]:
    """Return the names in `directory` of unfinished and replaced checkpoints."""
    return [path.name for path in directory.iterdir() if path.name.startswith(".") or "replaced" in path.name]


def same(first: Any, second: Any) -> bool:
    """Return true if two snapshots are equal bit for bit."""
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


@pytest.mark.parametrize("tied", [False, True])
def test_a_run_saved_before_its_first_update_goes_on_as_one_that_never_stopped(tmp_path: Path, tied: bool) -> None:
    in_processes(1, tmp_path, train, tmp_path / "whole", tmp_path / "whole.pt", 2, 9, tied)
    in_processes(1, tmp_path, save_new, tmp_path / "parts", tied)
    in_processes(1, tmp_path, train, tmp_path / "parts", tmp_path / "parts.pt", 2, 9, tied)
    assert same(torch.load(tmp_path / "whole.pt"), torch.load(tmp_path / "parts.pt"))


def test_a_checkpoint_without_optimiser_state_takes_it_from_an_optimiser_that_has_some(tmp_path: Path) -> None:
    save_new(tmp_path, False)
    model, optimiser = tiny()
    update(model, optimiser)
    checkpoint, _ = latest(tmp_path)
    assert checkpoint is not None
    restore(checkpoint, model, optimiser)
    assert not optimiser.state


@pytest.mark.parametrize(
    ("before", "after"), [(1, 2), (2, 1), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((2, 3), (2, 2)))]
)
def test_any_number_of_ranks_restores_what_any_other_number_saved(tmp_path: Path, before: int, after: int) -> None:
    in_processes(before, tmp_path, train, tmp_path / "run", tmp_path / "before.pt", 2, 2, False)
    in_processes(after, tmp_path, reshard, tmp_path / "run", tmp_path / "after.pt")
    saved, restored = torch.load(tmp_path / "before.pt"), torch.load(tmp_path / "after.pt")
    assert len(saved[1]) == 3 * len(saved[0])  # AdamW has step, exp_avg and exp_avg_sq per parameter
    assert same(saved, restored)


@pytest.mark.slow
def test_ranks_that_go_on_end_bit_for_bit_as_ranks_that_never_stopped(tmp_path: Path) -> None:
    for name, arguments in (("whole", (4, 9)), ("parts", (2, 2)), ("parts", (4, 9))):
        in_processes(2, tmp_path, train, tmp_path / name, tmp_path / f"{name}.pt", *arguments, True)
    assert same(torch.load(tmp_path / "whole.pt"), torch.load(tmp_path / "parts.pt"))


def test_a_full_disk_of_one_rank_is_told_to_all_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    in_processes(2, tmp_path, one_rank_without_space, tmp_path / "run", 2)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000001"]


@pytest.mark.slow
def test_ranks_share_the_verification_and_agree(tmp_path: Path) -> None:
    in_processes(2, tmp_path, train, tmp_path / "run", tmp_path / "a.pt", 1, 1, False)
    in_processes(2, tmp_path, train, tmp_path / "run", tmp_path / "a.pt", 2, 2, False)
    for name in ("rank-00000-000.safetensors", "rank-00001-000.safetensors"):
        file = tmp_path / "run" / "step-00000002" / name
        written = file.read_bytes()
        file.write_bytes(written[:-1] + bytes([written[-1] ^ 1]))  # one bit differs, and the size is the same
        note = f"run/step-00000002 is damaged ({name} was altered); step-00000001 is used"
        in_processes(2, tmp_path, ranks_that_look, tmp_path / "run", note)
        file.write_bytes(written)


def test_save_returns_before_the_disk_does_and_what_changes_then_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, fsync = threading.Event(), os.fsync

    def wait_for_disk(descriptor: int) -> None:
        assert free.wait(60)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", wait_for_disk)
    checkpoints = Checkpoints(tmp_path)
    model, optimiser = filled(0)
    for step in (1, 2):
        free.clear()
        for parameter in model.parameters():
            nn.init.constant_(parameter, step)
        checkpoints.save(step, model, optimiser, {"step": step})
        for parameter in model.parameters():
            nn.init.constant_(parameter, -1)  # while the thread waits in fsync
        assert not (tmp_path / f"step-{step:08d}").exists()
        free.set()
        checkpoints.wait()
        assert restore_latest(tmp_path).step == step
    checkpoints.close()


def test_the_newest_stay(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in (2, 3, 4)]
    save(tmp_path, 5, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_a_damaged_checkpoint_does_not_count_among_those_that_stay(tmp_path: Path) -> None:
    (save(tmp_path, 1, 2) / "rank-00000-000.safetensors").unlink()
    save(tmp_path, 3)  # keep is 2: step 3 and step 1, the newest whole one before it
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_checkpoints_later_than_the_one_written_are_left_alone(tmp_path: Path) -> None:
    save(tmp_path, 7, 8)
    save(tmp_path, 1, 2, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in (2, 7, 8)]


def test_a_step_saved_again_takes_the_place_of_the_damaged_one(tmp_path: Path) -> None:
    (save(tmp_path, 1, 2) / "rank-00000-000.safetensors").unlink()
    save(tmp_path, 2)
    assert restore_latest(tmp_path).step == 2
    assert leftovers(tmp_path) == []


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # only the hash can show it
    path.write_bytes(content)


def _record(**fields: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


@pytest.mark.parametrize(
    ("name", "harm", "reason"),
    [
        ("rank-00000-000.safetensors", _cut, "rank-00000-000.safetensors is truncated"),
        ("rank-00000-000.safetensors", _lengthen, "rank-00000-000.safetensors is longer than it was"),
        ("rank-00000-000.safetensors", _alter, "rank-00000-000.safetensors was altered"),
        ("rank-00000-000.safetensors", Path.unlink, "rank-00000-000.safetensors is missing"),
        ("checkpoint.json", Path.unlink, "checkpoint.json is missing"),
        ("checkpoint.json", _cut, "checkpoint.json cannot be read: "),
        ("checkpoint.json", _record(position={"step": 7}), "checkpoint.json was altered"),
        ("checkpoint.json", _record(format="other"), "checkpoint.json does not have the format treepack-checkpoint"),
        ("checkpoint.json", _record(version=1), "checkpoint.json was altered"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_note(
    tmp_path: Path, name: str, harm: Callable[[Path], None], reason: str
) -> None:
    directory = tmp_path / "checkpoints"
    path = save(directory, 10, 20) / name
    if harm is _cut and name == "checkpoint.json":
        _cut(path)  # the last byte is only the end of the line
    harm(path)
    checkpoint, notes = latest(directory)
    assert (restore_latest(directory), restore_latest(directory).step) == (checkpoint, 10)
    (note,) = notes
    assert note.startswith(f"checkpoints/step-00000020 is damaged ({reason}")
    assert note.endswith("; step-00000010 is used")


def test_a_directory_without_checkpoints_has_no_latest(tmp_path: Path) -> None:
    Checkpoints(tmp_path / "empty").close()
    assert latest(tmp_path / "empty") == latest(tmp_path / "absent") == (None, ())


def test_checkpoints_that_are_all_damaged_are_refused_and_not_taken_for_none(tmp_path: Path) -> None:
    for path in (save(tmp_path, 1, 2), tmp_path / "step-00000001"):
        _cut(path / "rank-00000-000.safetensors")
    with pytest.raises(TreepackError, match=r"step-00000002 is damaged .* and .*step-00000001 is damaged"):
        latest(tmp_path)


def _refusal(directory: Path, saved: tuple[Any, Any], target: tuple[Any, Any]) -> str:
    checkpoints = Checkpoints(directory)
    checkpoints.save(1, *saved, {})
    checkpoints.close()
    checkpoint, _ = latest(directory)
    assert checkpoint is not None
    # A refusal must not leave a model that is half restored.
    before = {name: value.clone() for name, value in target[0].state_dict().items()}
    with pytest.raises(TreepackError) as refusal:
        restore(checkpoint, *target)
    assert same(before, dict(target[0].state_dict()))
    return str(refusal.value)


def test_a_model_with_other_parameters_is_refused_by_the_name_of_one(tmp_path: Path) -> None:
    more, fewer = tiny(num_hidden_layers=3), tiny(num_hidden_layers=1)
    assert "the checkpoint has no model.layers.2." in _refusal(tmp_path / "more", tiny(), more)
    assert "the model has no model.layers.1." in _refusal(tmp_path / "fewer", tiny(), fewer)
    wide = _refusal(tmp_path / "wide", tiny(), tiny(intermediate_size=32))
    assert "mlp.gate_proj.weight is torch.float32 of shape (24, 16) in the checkpoint and torch.float32 of" in wide
    rounded = tiny()
    rounded[0].bfloat16()
    assert "torch.bfloat16 of shape" in _refusal(tmp_path / "rounded", tiny(), rounded)


def test_an_optimiser_that_groups_its_parameters_otherwise_is_refused(tmp_path: Path) -> None:
    model, _ = tiny()
    assert "contains 2 groups" in _refusal(tmp_path / "one", tiny(), (model, torch.optim.AdamW(model.parameters())))
    first, *others = model.parameters()
    split = torch.optim.AdamW([{"params": [first]}, {"params": others}])
    assert " is in another group of this optimiser" in _refusal(tmp_path / "two", tiny(), (model, split))


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    model, optimiser = tiny(tied=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    untied = _refusal(tmp_path, (model, optimiser), tiny())
    assert "has no lm_head.weight" in untied
    saved = read_layout([*(tmp_path / "step-00000001").glob("*.safetensors")])
    assert "model.model.embed_tokens.weight" in saved
    assert "model.lm_head.weight" not in saved


def test_the_options_of_the_groups_come_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    model, optimiser = tiny()
    optimiser.param_groups[1]["lr"] = 0.25
    checkpoints.save(1, model, optimiser, {})
    checkpoints.close()
    other, checkpoint = tiny(), latest(tmp_path)[0]
    assert checkpoint is not None
    restore(checkpoint, *other)
    assert [group["lr"] for group in other[1].param_groups] == [1e-2, 0.25]
    snapshot(tmp_path / "a", model, optimiser)
    snapshot(tmp_path / "b", *other)
    assert same(torch.load(tmp_path / "a"), torch.load(tmp_path / "b"))


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refusal(Checkpoints, tmp_path / "file" / "checkpoints").endswith(
        "cannot hold checkpoints (Not a directory); choose another directory"
    )


def test_a_save_that_failed_is_told_at_the_next_one_and_leaves_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run")
    (tmp_path / "run").rmdir()
    (tmp_path / "run").write_text("")  # a file in place of the directory makes the thread fail
    checkpoints.save(1, *filled(1), {})
    with pytest.raises(TreepackError, match=r"^[^\n]*step-00000001: the checkpoint could not be written[^\n]*$"):
        checkpoints.save(2, *filled(2), {})
    (tmp_path / "run").unlink()
    (tmp_path / "run").mkdir()
    checkpoints.save(3, *filled(3), {"step": 3})
    checkpoints.close()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000003"]
    assert restore_latest(tmp_path / "run").step == 3


@pytest.mark.parametrize(
    "num_bytes", [pytest.param(0, marks=pytest.mark.slow), 100, 5000, pytest.param(20000, marks=pytest.mark.slow)]
)
def test_a_full_disk_leaves_the_checkpoint_before_and_nothing_else(tmp_path: Path, num_bytes: int) -> None:
    run = tmp_path / "run"
    save(run, 1)
    in_processes(1, tmp_path, save_in_little_space, run, num_bytes)
    assert [path.name for path in run.iterdir()] == ["step-00000001"]
    assert restore_latest(run).step == 1


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_a_run_killed_at_any_change_of_the_disk_has_the_checkpoint_before_or_the_new_one(
    tmp_path: Path, again: bool
) -> None:
    # The process stops before its event-th fsync, rename or rmtree and is killed there. The loop ends when the save
    # has fewer events.
    outcomes, reached = [], []
    for event in range(100):
        run = tmp_path / str(event)
        save(run, 1, 2, 3) if again else save(run, 1, 2)
        process, connection = start(save_until, run, 3, event)
        reached.append(connection.recv())
        process.kill()
        process.join()
        outcomes.append(restore_latest(run).step)
        dead = leftovers(run)
        save(run, 4, 5)
        assert restore_latest(run).step == 5
        assert leftovers(run) == []
        if reached[-1] == "done":
            break
        assert dead or outcomes[-1] == 3
    assert reached[-1] == "done"
    assert [reached.count(f"here {name}") > 0 for name in ("fsync", "rename", "rmtree")] == [True] * 3
    assert set(outcomes) == ({3} if again else {2, 3})
    assert outcomes == sorted(outcomes)  # once an event leaves the new checkpoint, all later ones do


def test_runs_killed_at_random_moments_go_on_from_a_whole_checkpoint(tmp_path: Path) -> None:
    moments = random.Random(0)
    inside, latest_step = 0, 0
    for _ in range(6):
        process, connection = start(save_forever, tmp_path)
        target = latest_step + moments.randrange(2, 5)
        while latest_step < target:
            latest_step = connection.recv()  # so the step before is finished or being written
        time.sleep(moments.uniform(0, 0.06))
        process.kill()
        process.join()
        inside += bool(leftovers(tmp_path))
        while connection.poll():
            try:
                latest_step = connection.recv()
            except EOFError:
                break
        # The number is sent before `save` waits for the previous step, so the step before that is surely whole.
        step = restore_latest(tmp_path).step
        assert latest_step - 2 <= step <= latest_step
        latest_step = step
    assert inside > 0
    Checkpoints(tmp_path).close()
    assert leftovers(tmp_path) == []
