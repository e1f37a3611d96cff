"""Policies: a model trained on traces of a task until it solves a wanted share of the prompts, and the task with it.

    WarmUp --warm_up--> FOLDER: model, warm_up.json      FOLDER --load_task--> Task

Most policies have Qwen3's shape and start from random weights. A `WarmUp` without a shape starts from
SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from decode import DecodeEngine
from sums import save_smollm2
from tasks import Task, make_task, pass_rates, sample_trees
from torch import Tensor
from words import PAD, WORDS

from treepack.errors import TreepackError
from treepack.model.load import hide_progress_bars
from treepack.rollout.engine import Engine
from treepack.rollout.query import Query
from treepack.trajectory import Float64, Int32

HELD_OUT_SEED = 1_000_003  # prompts that no arm trains
SAMPLES_AT_ONCE = 16  # batches whose traces are made together
MAX_POSITIONS = 512
SHAPES: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4},
    "tiny": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2},
    "test": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
}


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The training of a policy on traces."""

    shape: str | None  # a name of SHAPES, or None for SmolLM2
    wanted: float  # pass rate of held-out prompts at which the training ends
    rate: float = 1e-3  # learning rate, constant after `rising` steps
    batch: int = 256  # traces of a step
    rising: int = 100  # steps in which the rate rises from 0
    every: int = 100  # steps between two evaluations
    max_steps: int = 4000
    prompts: int = 512  # of an evaluation, with 4 rollouts each
    levels: Sequence[int] | None = None  # of the task; None for all
    dial: Mapping[str, float] = field(default_factory=dict)  # of the task


def make_policy(shape: str, *, seed: int = 0) -> Any:
    """Return a model of Qwen3's shape with random weights in float32; the process keeps its random state."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = SHAPES[shape]
    config = Qwen3Config(
        vocab_size=len(WORDS),
        **sizes,
        num_key_value_heads=sizes["num_attention_heads"] // 2,
        head_dim=sizes["hidden_size"] // sizes["num_attention_heads"],
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).float().eval()


def warm_up(folder: Path, name: str, setting: WarmUp, *, device: str, minutes: float) -> None:
    """Train a policy for the task `name` and save it to the new `folder`, with the training's record."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    begin, source = time.monotonic(), None
    if setting.shape is None:
        source = folder.with_name("SmolLM2-135M-Instruct")
        if not source.exists():
            save_smollm2(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).to(device).eval()
    else:
        model = make_policy(setting.shape).to(device)
    task = make_task(name, levels=setting.levels, model=source, **setting.dial)
    engine = DecodeEngine(model, task.sampling)
    held_out = held_out_queries(task, setting.prompts)
    rates = {0: float(np.mean(evaluate(task, engine, held_out, samples=4)))} if source else dict[int, float]()
    for step in train(model, task, setting, device):
        is_last = step == setting.max_steps or time.monotonic() - begin > 60 * minutes
        if step % setting.every == 0 or is_last:
            rates[step] = float(np.mean(evaluate(task, engine, held_out, samples=4)))
            print(f"step {step}: pass rate {rates[step]:.3f}, {time.monotonic() - begin:.0f} s", flush=True)
            if rates[step] >= setting.wanted or is_last:
                break
    with hide_progress_bars():
        model.save_pretrained(folder)
    if source is not None:
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    dial = {name: getattr(task.dial, name) for name in task.dial.__slots__}
    record = {"task": name, "dial": dial, "levels": setting.levels, "pass_rates": rates}
    (folder / "warm_up.json").write_text(json.dumps(record | {"seconds": time.monotonic() - begin}) + "\n")


def load_task(folder: Path) -> Task:
    """Return the task of a policy that `warm_up` saved, with its dial.

    Raises:
        TreepackError: the folder contains no whole policy.
    """
    path = folder / "warm_up.json"
    if not path.exists():
        raise TreepackError(f"{path}: there is no such file; make the policy first")
    record = json.loads(path.read_text())
    return make_task(record["task"], levels=record["levels"], model=folder, **record["dial"])


def held_out_queries(task: Task, num: int) -> list[Query]:
    """Return prompts of a seed that no arm trains."""
    return task.queries(num, seed=HELD_OUT_SEED)


def evaluate(task: Task, engine: Engine, queries: Sequence[Query], *, samples: int) -> Float64:
    """Return the pass rate of independent rollouts of each query, float64 [n], with the same seeds every time."""
    return pass_rates(sample_trees(task, queries, engine, task.independent(samples), seed=11))


def train(model: Any, task: Task, setting: WarmUp, device: str) -> Iterator[int]:
    """Train on new traces without end, and yield the number of steps after each one."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=setting.rate, betas=(0.9, 0.98), weight_decay=0.01)
    for step, (ids, mask) in enumerate(batches(task, setting.batch), 1):
        optimiser.param_groups[0]["lr"] = setting.rate * min(1.0, step / setting.rising)
        # bfloat16 products on a GPU; the weights and the loss stay float32.
        kind = torch.device(device).type
        with torch.autocast(kind, torch.bfloat16, enabled=kind != "cpu"):
            value = trace_loss(model, ids.to(device), mask.to(device))
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        yield step


def trace_loss(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of the trained tokens. `ids` and `mask` are [B, N], padded at the end."""
    # No token sees padding, because it comes after it.
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view_as(ids[:, 1:])
    return (losses * mask[:, 1:]).sum() / mask[:, 1:].sum()


def batches(task: Task, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of `size` new traces without end: ids and mask, int64 [size, N] each, filled up with zeros."""
    for number in count():
        samples = task.examples(size * SAMPLES_AT_ONCE, seed=7919 * number)
        for chosen in np.random.default_rng([0, number]).permutation(len(samples)).reshape(-1, size):
            yield padded([samples[index] for index in chosen])


def padded(samples: Sequence[tuple[Int32, Int32]]) -> tuple[Tensor, Tensor]:
    """Return ids and masks of samples as tensors, int64 [B, N]."""
    both = np.zeros((2, len(samples), max(len(ids) for ids, _ in samples)), np.int64)
    for row, sample in enumerate(samples):
        for lines, values in zip(both, sample, strict=True):
            lines[row, : len(values)] = values
    return torch.from_numpy(both[0]), torch.from_numpy(both[1])
