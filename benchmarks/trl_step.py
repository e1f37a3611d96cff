"""One training step of TRL's GRPOTrainer on one GPU, without and with treepack, side by side in one run.

    python benchmarks/trl_step.py [--model qwen3-1.7b] [--generations 8] [--turns 8] [--turn-tokens 512] [--json FILE]
    python benchmarks/trl_step.py --dry-run        a tiny model and tiny rollouts on the CPU

Besides treepack's own packages it needs: trl==1.16.0 accelerate datasets, and what datasets needs: pandas
python-dateutil tzdata multiprocess dill xxhash httpx aiohttp.

Both ways train the same random model on the same rollouts of a prompt, which come from `rollout_func`, so nothing is
generated. All rollouts have the same length: TRL's batch then has no padding, and its attention runs without a mask,
which is its fastest way. Both ways use TRL's defaults, such as gradient checkpointing. The time of a step is from its
begin to the end of the optimiser's step, with TRL's rewards, loss and metrics.

    prompt - turn - turn - turn        a turn is half the model's, half the tool's; a rollout leaves an earlier one
        \\       \\ - turn - turn        after one of its turns with probability --fork, else it shares the prompt only
         turn - turn - turn

operations   floating-point operations of forward and backward, flat over tree (costs.model_cost)
speed-up     seconds of a step, TRL over treepack, medians over --steps
efficiency   speed-up over operations
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from treepack.costs.model_cost import FlopCount, operations, shape_of
from treepack.costs.presets import PRESETS
from treepack.integrations.trl import tree_trainer
from treepack.online import OnlineOptions

TINY: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 1464, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
ROOT = Path(__file__).resolve().parents[1]
WORDS = 1400  # ids that every tokenizer here can decode; the values do not change the work


@dataclass(frozen=True)
class Rollouts:
    """Completions of one prompt: tokens, and 1 for each token of the model, 0 for each of the tool."""

    prompt: list[int]
    completions: list[list[int]]
    masks: list[list[int]]


@dataclass
class Timing:
    """Seconds of each step after the warm-up, gradient norms, tokens through the layers in one step, peak bytes."""

    seconds: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tokens: int = 0
    peak: int = 0


def make_rollouts(args: argparse.Namespace) -> Rollouts:
    """Draw rollouts that leave each other after a turn, all of the same length."""
    rng = np.random.default_rng(args.seed)

    def draw(size: int) -> list[int]:
        return [int(token) for token in rng.integers(10, WORDS, size)]

    turns: list[list[list[int]]] = []
    for i in range(args.generations):
        shared: list[list[int]] = []
        if i and rng.random() < args.fork:
            shared = turns[rng.integers(i)][: rng.integers(1, args.turns)]
        turns.append([*shared, *(draw(args.turn_tokens) for _ in range(args.turns - len(shared)))])
    completions = [[token for turn in each for token in turn] for each in turns]
    half = args.turn_tokens // 2
    mask = ([1] * half + [0] * (args.turn_tokens - half)) * args.turns
    return Rollouts(draw(args.prompt_tokens), completions, [mask] * args.generations)


def count_work(rollouts: Rollouts) -> tuple[FlopCount, FlopCount]:
    """Return the work of the rollouts one by one, and of their tree. TRL scores every token of a completion."""
    start = len(rollouts.prompt)
    sequences = sorted([*rollouts.prompt, *completion] for completion in rollouts.completions)
    length = len(sequences[0])
    flat = FlopCount(length, length * (length + 1) // 2, length - start)
    total, tree, before = FlopCount(0, 0, 0), FlopCount(0, 0, 0), [-1] * length
    for ids in sequences:
        # In sorted order, the tokens that a sequence does not share with the one before it are new.
        shared = next((i for i, (a, b) in enumerate(zip(before, ids, strict=True)) if a != b), length)
        pairs = flat.pairs - shared * (shared + 1) // 2
        tree, total = tree + FlopCount(length - shared, pairs, length - max(shared, start)), total + flat
        before = ids
    return total, tree


class Clock(TrainerCallback):  # type: ignore[misc]
    """Measures the steps after the warm-up."""

    def __init__(self, timing: Timing, warmup: int) -> None:
        self.timing, self.warmup, self.start = timing, warmup, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            if state.global_step == self.warmup:
                torch.cuda.reset_peak_memory_stats()
        self.timing.tokens, self.start = 0, time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self.timing.peak = torch.cuda.max_memory_allocated()
        if state.global_step > self.warmup:
            self.timing.seconds.append(time.perf_counter() - self.start)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "grad_norm" in logs:
            self.timing.norms.append(float(logs["grad_norm"]))


def measure(base: type[Any], rollouts: Rollouts, args: argparse.Namespace, folder: str) -> Timing:
    """Train a fresh model with the trainer class `base`, and return its timing."""
    timing, device = Timing(), "cpu" if args.dry_run else "cuda"
    config = AutoConfig.for_model(**model_config(args), max_position_embeddings=1 << 17, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32 if args.dry_run else torch.bfloat16, attn_implementation=args.attention
        )
    hook = model.get_input_embeddings().register_forward_hook(
        lambda _, __, out: setattr(timing, "tokens", timing.tokens + out.shape[0] * out.shape[1])
    )
    count = args.generations

    def rollout(texts: list[str], _: Any) -> dict[str, Any]:
        repeats = len(texts) // count
        columns = {"completion_ids": rollouts.completions, "env_mask": rollouts.masks}
        return {"prompt_ids": [rollouts.prompt] * len(texts), "logprobs": None} | {
            name: column * repeats for name, column in columns.items()
        }

    trainer = base(
        model=model,
        reward_funcs=lambda completions, **_: [float(i * 7 % 5) for i in range(len(completions))],
        args=GRPOConfig(
            folder,
            per_device_train_batch_size=args.batch or count,
            gradient_accumulation_steps=count // (args.batch or count),
            num_generations=count,
            max_completion_length=args.turns * args.turn_tokens,
            max_steps=args.warmup + args.steps,
            temperature=0.9,
            bf16=not args.dry_run,
            use_cpu=args.dry_run,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 64}),
        processing_class=AutoTokenizer.from_pretrained(ROOT / "sample_data" / "tokenizer", padding_side="left"),
        rollout_func=rollout,
        callbacks=[Clock(timing, args.warmup)],
    )
    trainer.train()
    hook.remove()
    return timing


def model_config(args: argparse.Namespace) -> dict[str, Any]:
    return TINY if args.dry_run else dict(PRESETS[args.model])


def main() -> None:
    """Print a table of both ways, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-1.7b", choices=sorted(PRESETS))
    parser.add_argument("--attention", default="sdpa", help="TRL's attention: sdpa, flash_attention_2, ...")
    parser.add_argument("--generations", type=int, default=8, help="rollouts of the prompt")
    parser.add_argument("--batch", type=int, help="samples of a micro-batch; all rollouts by default")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--turn-tokens", type=int, default=512)
    parser.add_argument("--fork", type=float, default=0.6)
    parser.add_argument("--capacity", type=int, help="tokens of a row; a row for all rollouts by default")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    if args.dry_run:
        args.prompt_tokens, args.turn_tokens = args.prompt_tokens // 16, args.turn_tokens // 16
    rollouts = make_rollouts(args)
    flat, tree = count_work(rollouts)
    options = OnlineOptions(capacity=args.capacity or flat.tokens)
    results: dict[str, Timing] = {}
    for name, base in (("TRL", GRPOTrainer), ("treepack", tree_trainer(GRPOTrainer, options))):
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measure(base, rollouts, args, folder)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    report(results, flat, tree, args)


def report(results: dict[str, Timing], flat: FlopCount, tree: FlopCount, args: argparse.Namespace) -> None:
    """Print the table last, because TRL prints too.

    Raises:
        SystemExit: if the two ways have different gradients.
    """
    config = model_config(args)
    shape = shape_of(config, name=args.model)
    ratio = operations(shape, flat) / operations(shape, tree)
    seconds = {name: statistics.median(timing.seconds) for name, timing in results.items()}
    speedup = seconds["TRL"] / seconds["treepack"]
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(
        f"\n{args.generations} rollouts of {flat.tokens // args.generations} tokens, {where}, TRL with {args.attention}"
    )
    print(f"{'':10}{'tokens':>10}{'s per step':>12}{'peak GB':>10}{'gradient norm of step 1':>26}")
    for name, timing in results.items():
        print(f"{name:10}{timing.tokens:10,}{seconds[name]:12.3f}{timing.peak / 1e9:10.2f}{timing.norms[0]:26.6g}")
    print(f"operations {ratio:.3f}   speed-up {speedup:.3f}   efficiency {speedup / ratio:.3f}")
    if args.json:
        timings = {name: asdict(timing) for name, timing in results.items()}
        args.json.write_text(
            json.dumps({**timings, "operations": ratio, "speedup": speedup, "options": vars(args)}, default=str)
        )
    first = [timing.norms[0] for timing in results.values()]
    if abs(first[0] - first[1]) > 0.05 * first[0]:
        raise SystemExit(f"trl_step: the gradient norms {first} differ; expected equal training")


if __name__ == "__main__":
    main()
