"""Runs of TRL's own trainers on canned rollouts: losses, gradients, samples and computed tokens of each step.

prompt i -- turn A -- tool result -- answers 0, 1, 2          nothing is generated, so a run takes seconds
         \\ turn B -- tool result -- answer 3
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # trainers of TRL report their start otherwise
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import trl
from datasets import Dataset as Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer

from support.paths import SAMPLE_DATA
from treepack.integrations.trl import tree_trainer as tree_trainer

GENERATIONS = 4
STEPS = 3
WORDS = ["tree", "prefix", "row", "token", "branch", "leaf", "path", "root", "share", "batch"]
SETTINGS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": GENERATIONS,
    "max_completion_length": 32,
    "max_steps": STEPS,
    "temperature": 0.7,
    "learning_rate": 1e-4,
    "max_grad_norm": 0.0,
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
}


@dataclass
class Record:
    """What a run did.

    losses [micro-batch]; gradients [optimiser step][parameter]; samples [micro-batch][sample], its tokens; tokens
    [micro-batch], the number that the policy computed; logs [optimiser step].
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    samples: list[list[tuple[int, ...]]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)

    def step_samples(self) -> list[list[tuple[int, ...]]]:
        """Return the samples of each optimiser step, sorted."""
        size = len(self.samples) // STEPS
        windows = [self.samples[i : i + size] for i in range(0, len(self.samples), size)]
        return [sorted(sample for batch in window for sample in batch) for window in windows]


def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(SAMPLE_DATA / "tokenizer", padding_side="left")


def tiny_model(folder: Path) -> str:
    """Save a small qwen3 with random weights, and return its folder; a reference model is loaded from it too."""
    config = Qwen3Config(
        vocab_size=1464,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    # Larger than the initial weights: a model of nearly uniform distributions hides errors.
    for parameter in model.parameters():
        parameter.data.mul_(2.0)
    model.save_pretrained(folder)
    return str(folder)


def prompts(count: int) -> Dataset:
    """Return prompts of different lengths, so that a batch of them has padding on the left."""
    rng = np.random.default_rng(1)
    return Dataset.from_dict({"prompt": [" ".join(rng.choice(WORDS, size=36 + 9 * (i % 3))) for i in range(count)]})


def completion(prompt: list[int], k: int) -> tuple[list[int], list[int]]:
    """Return the tokens of answer k to a prompt, and 1 for each token of the model, 0 for each of the tool."""

    def draw(size: int, *seed: int) -> list[int]:
        return [int(token) for token in np.random.default_rng([sum(prompt), *seed]).integers(10, 1400, size)]

    branch = int(k == GENERATIONS - 1)
    turn, tool = draw(4, 1, branch), draw(3, 2, branch)
    answer = draw(3 + k % 3, 3, min(k, 1) if sum(prompt) % 2 else k)  # half of the prompts have two equal answers
    ids = [*turn, *tool, *answer] + ([2] if k % 2 else [])
    return ids, [1] * len(turn) + [0] * len(tool) + [1] * (len(ids) - len(turn) - len(tool))


def rollout(texts: list[str], trainer: Any, *, tools: bool = True) -> dict[str, Any]:
    """Return canned rollouts in the form of TRL's rollout_func; `texts` has each prompt GENERATIONS times."""
    prompt_ids = [trainer.processing_class(text)["input_ids"] for text in texts]
    pairs = [completion(ids, i % GENERATIONS) for i, ids in enumerate(prompt_ids)]
    result = {"prompt_ids": prompt_ids, "completion_ids": [ids for ids, _ in pairs], "logprobs": None}
    return {**result, "env_mask": [mask for _, mask in pairs]} if tools else result


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 11) for ids in completion_ids]


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": %d}}\n</tool_call><|im_end|>'


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one of them.
        b: the other one.

    Returns:
        their sum.
    """
    return a + b


class CannedTools(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer whose model calls a tool in its first turn, and answers in its second one."""

    def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        turns = []
        for i, ids in enumerate(prompt_ids):
            called = "<tool_response>" in self.processing_class.decode(ids[-40:])
            text = f"{i % 3}<|im_end|>" if called else CALL % (i % GENERATIONS // 2)
            turns.append(self.processing_class(text)["input_ids"])
        return turns, None


def with_tools() -> dict[str, Any]:
    """Return the arguments of `train` for a trainer with tools: conversations, a template with tools, and the tool."""
    named = tokenizer()
    named.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    questions = [[{"role": "user", "content": f"Add 1 and {i}."}] for i in range(12)]
    return {"tools": [add], "train_dataset": Dataset.from_dict({"prompt": questions}), "processing_class": named}


class CannedRLOO(RLOOTrainer):  # type: ignore[misc]
    """RLOOTrainer with canned completions in place of its generation, because it has no rollout_func."""

    def _generate_single_turn(self, prompt_ids: Any, images: Any, fields: Any) -> list[list[int]]:
        return [completion(ids, i % GENERATIONS)[0] for i, ids in enumerate(prompt_ids)]


class Gradients(TrainerCallback):  # type: ignore[misc]
    """Writes the gradients of every optimiser step to a record."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **values: Any) -> None:
        named = values["model"].named_parameters()
        grads = [(name, p.grad) for name, p in named if p.grad is not None]
        # A sharded gradient is a DTensor.
        whole = {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone() for name, grad in grads}
        self.record.gradients.append(whole)


def recorded(base: type[Any], record: Record) -> type[Any]:
    """Return a subclass of a trainer of rollouts that writes losses, samples and the policy's tokens to `record`."""

    class Recorded(base):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1).bool()
            record.samples.append([tuple(row[real].tolist()) for row, real in zip(ids, mask, strict=True)])
            words = self.accelerator.unwrap_model(model).get_input_embeddings()
            record.tokens.append(0)
            hook = words.register_forward_hook(lambda _, __, out: count_tokens(record, out))
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            hook.remove()
            record.losses.append(float(loss.detach()))
            return loss

    return Recorded


def count_tokens(record: Record, words: Tensor) -> None:
    record.tokens[-1] += words.shape[0] * words.shape[1]


def train(
    base: type[Any],
    model: str,
    folder: Path,
    *,
    config: type[Any] = GRPOConfig,
    tools: bool = True,
    more: dict[str, Any] | None = None,
    **changes: Any,
) -> Record:
    """Train on canned rollouts with the trainer class `base`, and return what happened.

    Args:
        base: GRPOTrainer or RLOOTrainer, or a subclass. RLOOTrainer has no rollout_func, so it must be canned itself.
        model: a folder with weights.
        folder: for the output of the trainer.
        config: the class of its settings.
        tools: whether rollouts have a mask of the tool's tokens.
        more: further arguments of the trainer.
        changes: to `SETTINGS`.
    """
    record = Record()
    more = dict(more or {})
    if not issubclass(base, RLOOTrainer) and "tools" not in more:
        more.setdefault("rollout_func", lambda texts, trainer: rollout(texts, trainer, tools=tools))
    torch.manual_seed(3)  # for the weights of an adapter
    arguments = {"train_dataset": prompts(12), "processing_class": tokenizer(), **more}
    trainer = recorded(base, record)(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=config(str(folder), **{**SETTINGS, **changes}),
        reward_funcs=reward,
        callbacks=[Gradients(record)],
        **arguments,
    )
    trainer.train()
    record.logs = [log for log in trainer.state.log_history if "loss" in log]
    return record


def train_both(model: str, folder: Path, *, base: type[Any] = GRPOTrainer, **settings: Any) -> tuple[Record, Record]:
    """Train with `base` on trees and as it is; see `train`."""
    return train(tree_trainer(base), model, folder, **settings), train(base, model, folder, **settings)


def make_trainer(
    base: type[Any], model: Any, folder: Path, *, more: dict[str, Any] | None = None, **changes: Any
) -> Any:
    """Return a trainer of rollouts with few prompts; `more` are further arguments, `changes` are to `SETTINGS`."""
    return base(
        model=AutoModelForCausalLM.from_pretrained(model) if isinstance(model, str) else model,
        args=GRPOConfig(str(folder), **{**SETTINGS, **changes}),
        reward_funcs=reward,
        train_dataset=prompts(4),
        processing_class=tokenizer(),
        **(more or {}),
    )


def loss_errors(record: Record, expected: Record) -> list[float]:
    """Return the absolute difference of the loss of each optimiser step."""
    ours, theirs = (np.array(each.losses).reshape(STEPS, -1).sum(1) for each in (record, expected))
    return [float(difference) for difference in np.abs(ours - theirs)]


def gradient_errors(record: Record, expected: Record) -> list[float]:
    """Return for each step the largest |difference| / |expected| over all parameters."""
    errors = []
    for ours, theirs in zip(record.gradients, expected.gradients, strict=True):
        assert ours.keys() == theirs.keys()
        errors.append(max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs))
    return errors


def assert_same_training(record: Record, expected: Record) -> None:
    """Step 1 differs by rounding only; at later steps, weights have drifted apart by rounding."""
    assert len(record.gradients) == len(expected.gradients) == STEPS
    assert all(float(gradient.norm()) > 0 for gradient in expected.gradients[0].values())
    losses, gradients = loss_errors(record, expected), gradient_errors(record, expected)
    assert losses[0] <= 1e-6
    assert gradients[0] <= 2e-5  # 1.1e-5 on CPUs with AVX512-BF16, whose products in float32 round otherwise
    assert max(losses[1:]) <= 1e-5
    assert max(gradients[1:]) <= 1e-3
