"""Programs of the checkpoint tests, each in its own process: training runs of one or several ranks, and savers to kill.

in_processes   run a function in N fresh processes, joined by gloo if there are several
train          updates of a tiny model whose data comes from the generators of random numbers
snapshot       all that such a run is made of, as whole tensors
save_until     save one checkpoint and stand still before the n-th thing that reaches the disk
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from support.fresh_processes import PROCESSES
from support.oracle_model import CONFIGS, VOCABULARY
from treepack.errors import TreepackError
from treepack.train.saving.checkpoint import Checkpoints, latest, restore


def in_processes(ranks: int, directory: Path, run: Callable[..., None], *arguments: Any) -> None:
    """Run `run(*arguments)` in `ranks` fresh processes and fail if one fails; `directory` holds their meeting point."""
    meeting = directory / f"meeting-{time.monotonic_ns()}"
    started = [
        PROCESSES.Process(target=_rank, args=(rank, ranks, meeting, run, arguments), daemon=True)
        for rank in range(ranks)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
        process.kill()
    assert [process.exitcode for process in started] == [0] * ranks


def _rank(rank: int, ranks: int, meeting: Path, run: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    run(*arguments)
    if ranks > 1:
        dist.destroy_process_group()


def start(run: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
    """Start `run(*arguments, connection)` in a process, with the other end of the connection."""
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=run, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def tiny(*, tied: bool = False, **fields: Any) -> tuple[Any, torch.optim.AdamW]:
    """A tiny Qwen3, sharded if there are several ranks, and its AdamW with and without decay."""
    settings = {**CONFIGS["qwen3"], "vocab_size": VOCABULARY, "tie_word_embeddings": tied, **fields}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **settings), dtype=torch.float32)
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


def seed() -> None:
    """Seed every generator, differently on every rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)


def update(model: Any, optimiser: torch.optim.Optimizer) -> None:
    """One update on tokens that all three generators have a part in."""
    drawn = [random.randrange(VOCABULARY), np.random.randint(VOCABULARY), *torch.randint(VOCABULARY, (7,)).tolist()]
    optimiser.zero_grad(set_to_none=True)
    logits = model(input_ids=torch.tensor([drawn]), use_cache=False).logits[0]
    torch.autograd.backward(nn.functional.cross_entropy(logits[:-1], torch.tensor(drawn[1:])))
    optimiser.step()


def train(directory: Path, out: Path, updates: int, save_at: int, tied: bool) -> None:
    """Start, or continue from the latest checkpoint, up to `updates`; save at `save_at`; snapshot to `out`."""
    model, optimiser = tiny(tied=tied)
    seed()
    checkpoints = Checkpoints(directory)
    checkpoint, notes = latest(directory)
    assert notes == ()
    done = restore(checkpoint, model, optimiser)["done"] if checkpoint else 0
    for number in range(done, updates + 1):
        if number == save_at and number > done:
            checkpoints.save(number, model, optimiser, {"done": number})
        if number < updates:
            update(model, optimiser)
    checkpoints.close()
    snapshot(out, model, optimiser)


def save_new(directory: Path, tied: bool) -> None:
    """Save a run that has made no update."""
    model, optimiser = tiny(tied=tied)
    seed()
    checkpoints = Checkpoints(directory)
    checkpoints.save(0, model, optimiser, {"done": 0})
    checkpoints.close()
    assert not optimiser.state


def reshard(directory: Path, out: Path) -> None:
    """Restore whatever ranks saved, snapshot to `out`, and see that an update and a save work from there."""
    model, optimiser = tiny()
    torch.manual_seed(99)
    untouched = torch.get_rng_state()
    checkpoint, _ = latest(directory)
    assert checkpoint is not None
    restore(checkpoint, model, optimiser)
    rank = dist.get_rank() if dist.is_initialized() else 0
    assert torch.equal(torch.get_rng_state(), untouched) == (rank >= checkpoint.world_size)
    snapshot(out, model, optimiser)
    update(model, optimiser)


def snapshot(out: Path, model: Any, optimiser: torch.optim.Optimizer) -> None:
    """Weights, optimiser state and groups as whole tensors, and the states of the generators of rank 0."""
    weights = {name: _whole(value) for name, value in model.state_dict().items()}
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    names = [[name_of[id(parameter)] for parameter in group["params"]] for group in optimiser.param_groups]
    states = cast(dict[nn.Parameter, dict[str, Any]], optimiser.state)
    state = {f"{name_of[id(p)]}.{key}": _whole(value) for p, values in states.items() for key, value in values.items()}
    saved = optimiser.state_dict()
    options = [{key: value for key, value in group.items() if key != "params"} for group in saved["param_groups"]]
    generators = [random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist(), torch.get_rng_state()]
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save([weights, state, names, options, generators], out)


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def one_rank_without_space(directory: Path, ranks: int) -> None:
    """Save twice; the last rank's disk is full the second time, and every rank must hear of it."""
    model, optimiser = tiny()
    checkpoints = Checkpoints(directory)
    checkpoints.save(1, model, optimiser, {})
    checkpoints.wait()
    if dist.get_rank() == ranks - 1:
        pytest.MonkeyPatch().setattr(os, "fsync", _full)
    checkpoints.save(2, model, optimiser, {})
    with pytest.raises(TreepackError, match=r"step-00000002: the checkpoint could not .* \(No space left on device\)"):
        checkpoints.wait()
    checkpoints.close()


def _full(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def ranks_that_look(directory: Path, note: str) -> None:
    """See that this rank finds step 1, and `note` about the newer one."""
    checkpoint, notes = latest(directory)
    assert checkpoint is not None
    assert (checkpoint.step, notes) == (1, (note,))


def save_in_little_space(directory: Path, num_bytes: int) -> None:
    """Save step 2 while no file may be larger than `num_bytes`."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
    checkpoints = Checkpoints(directory)
    checkpoints.save(2, *filled(2), {})
    with pytest.raises(TreepackError, match=r"step-00000002: the checkpoint could not be written \(File too large\)"):
        checkpoints.close()


def filled(value: int) -> tuple[nn.Linear, torch.optim.SGD]:
    """A layer all of whose weights are `value`."""
    model = nn.Linear(64, 64)
    for parameter in model.parameters():
        nn.init.constant_(parameter, float(value))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def save_until(directory: Path, step: int, event: int, connection: Connection) -> None:
    """Save `step`, one of the same step too; send "here" and stand still before the disk's `event`-th change."""
    count = 0

    def counted(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            if count == event:
                connection.send(f"here {name}")
                time.sleep(600)
            count += 1
            return change(*arguments, **options)

        return run

    checkpoints = Checkpoints(directory)
    for module, name in ((os, "fsync"), (os, "rename"), (shutil, "rmtree")):
        setattr(module, name, counted(name, getattr(module, name)))
    checkpoints.save(step, *filled(step), {"step": step})
    checkpoints.close()
    connection.send("done")


def save_forever(directory: Path, connection: Connection) -> None:
    """Save one step after the other, each slowly; send every step before it is saved."""
    slow = os.fsync

    def fsync(descriptor: int) -> None:
        time.sleep(0.01)
        slow(descriptor)

    pytest.MonkeyPatch().setattr(os, "fsync", fsync)
    checkpoint, _ = latest(directory)
    step = checkpoint.step if checkpoint else 0
    checkpoints = Checkpoints(directory)
    while True:
        step += 1
        connection.send(step)
        checkpoints.save(step, *filled(step), {"step": step})
