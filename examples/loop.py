"""Reinforcement learning on trees of rollouts, as one loop in one process; a file to copy and to change.

    problems --sample--> trees --credit--> trie with advantages --accumulate--> gradients
        ^                                                                          |
        '---- engine with the new weights <--publish-- weights <--optimiser step --'

    python examples/loop.py             a tiny model learns to add on a CPU: pass rate 0.45 -> about 0.95 in a minute
    python examples/loop.py --model Qwen/Qwen3-0.6B --device cuda --bf16 --lr 1e-6 --steps 200 --largest 999 \
        --held-out 64 --eval-problems 64 --problems 32 --width 16 --segment 4 --max-tokens 16 --save trained

A step samples a tree of rollouts for each of a few problems, turns the rewards of the leaves into advantages, packs the
trees into rows that contain every common prefix once, takes one optimiser step, and prints one JSON line. Its gradient
is that of each rollout trained alone. The engine samples from the trained weights, so publishing them copies nothing.

The task is to write the sum of two numbers. For a task of your own, replace the section "The task". For several turns
with tools, give `sample_tree` an episode with an environment (docs/environments.md). Rows longer than memory run
through `backward_row` (docs/your-trainer.md). docs/tree-rl.md has the same loop as commands, with a server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, fields
from itertools import product, takewhile
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
from transformers import AutoTokenizer

import treepack
from treepack.model.forward import row_logprobs
from treepack.objectives.losses import objective_loss
from treepack.objectives.objective import choose_objective
from treepack.objectives.row_factors import row_factors
from treepack.rl.advantages.estimate import estimate_advantages, with_advantages
from treepack.rollout.engine import derived_seed
from treepack.rollout.episode import SingleTurn
from treepack.rollout.in_process.local import LocalEngine, LocalOptions, default_stop_tokens
from treepack.rollout.options import Sampling, TreeOptions, independent
from treepack.rollout.query import Query
from treepack.rollout.records import tree_trajectories
from treepack.rollout.sampler import sample_tree
from treepack.rollout.tree import Tree, weights_of_leaves


@dataclass(frozen=True)
class Settings:
    """The options of the command line, with `-` in place of `_`."""

    model: str = str(Path(__file__).with_name("sums.json"))  # a directory, a name on the hub, or a config
    device: str = "cpu"
    bf16: bool = False  # train under autocast, and sample from a copy of the weights in bfloat16
    engine_memory: float = 0.3  # share of the free memory of a GPU for the keys of the engine; training needs the rest
    seed: int = 0
    warm_up: int = 150  # steps of supervised training before the loop, if the model has random weights
    steps: int = 60
    largest: int = 4  # largest number of a problem
    problems: int = 16  # trees of a step
    width: int = 8  # rollouts of a tree
    segment: int = 1  # tokens between two forks
    max_tokens: int = 4  # of a rollout
    temperature: float = 1.0
    estimator: str = "treepo"  # or grpo, treerpo, ...: the table of docs/tree-rl.md
    leaf_weights: bool = False  # weigh leaves, which removes the bias of means over a tree
    loss: str = "grpo"  # or ppo, dapo, cispo, ...: docs/objectives.md
    lr: float = 2e-3
    capacity: int = 4096  # tokens of a row
    eval_every: int = 20  # steps between two evaluations
    eval_problems: int = 32
    eval_samples: int = 4  # independent rollouts of each of them
    held_out: int = 0  # problems that are evaluated and never trained; the tiny model learns by heart
    save: str = ""  # directory for the trained model


# The task: problems, a reward, and the tokens of the tiny model.


@dataclass(frozen=True)
class Problem:
    """A prompt, and the text that is its right answer."""

    prompt: str
    answer: str


def make_problems(largest: int) -> list[Problem]:
    """Return all sums of two numbers from 0 to `largest`; a line break ends an answer."""
    return [Problem(f"{a}+{b}=", f"{a + b}\n") for a, b in product(range(largest + 1), repeat=2)]


def reward(text: str, answer: str) -> float:
    """Return the share of `answer` that the beginning of `text` has in common with it; 1 is a pass."""
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(text, answer, strict=False))
    return len(list(equal)) / len(answer)


class Characters:
    """A tokenizer of one token per character, for the model without a tokenizer."""

    ALPHABET = "0123456789+=\n"

    def encode(self, text: str) -> list[int]:
        return [self.ALPHABET.index(each) for each in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.ALPHABET[i] if i < len(self.ALPHABET) else "?" for i in ids)


# The loop.


@dataclass(frozen=True)
class Actors:
    """The parts of the loop that keep a state. `engine` samples from the weights of `sampler`, `policy` is trained."""

    policy: Any
    sampler: torch.nn.Module
    engine: LocalEngine
    optimiser: torch.optim.Optimizer
    tokenizer: Any


def start(settings: Settings) -> Actors:
    """Load the model and its tokenizer, and start an engine on the weights that will be trained."""
    options: dict[str, Any] = {"device": settings.device, "seed": settings.seed}
    name, low = settings.model, torch.bfloat16 if settings.bf16 else None
    policy = treepack.load_model(name, autocast=low, **options)
    # In float32, trained weights and sampled weights are the same tensors. A copy in bfloat16 samples faster on a GPU.
    sampler = policy.causal if low is None else treepack.load_model(name, dtype=low, **options).causal
    tokenizer: Any = Characters() if name.endswith(".json") else AutoTokenizer.from_pretrained(name)
    stops = {tokenizer.encode("\n")[-1], *default_stop_tokens(name)}
    sampling = Sampling(settings.temperature, stop_token_ids=tuple(sorted(stops)))
    engine = LocalEngine(sampler, sampling, options=LocalOptions(memory_share=settings.engine_memory))
    optimiser = torch.optim.AdamW(policy.model.parameters(), lr=settings.lr, weight_decay=0.0)
    return Actors(policy, sampler, engine, optimiser, tokenizer)


def warm_up(actors: Actors, problems: list[Problem], settings: Settings) -> None:
    """Train the policy on answers, half of them taken from random problems, so that the loop can improve it."""
    rng = np.random.default_rng(settings.seed)
    for _ in range(settings.warm_up):
        chosen = rng.choice(len(problems), 64)
        others = np.where(rng.random(64) < 0.5, chosen, rng.choice(len(problems), 64))
        prompts = [actors.tokenizer.encode(problems[i].prompt) for i in chosen]
        answers = [actors.tokenizer.encode(problems[i].answer) for i in others]
        pairs = list(zip(prompts, answers, strict=True))
        ids, masks = [a + b for a, b in pairs], [[0] * len(a) + [1] * len(b) for a, b in pairs]
        trie = treepack.build_trie(treepack.trajectories_from_arrays(ids, masks))
        rows = list(treepack.plan_packing(trie, treepack.PackOptions(capacity=settings.capacity)))
        for row in rows:
            loss = treepack.row_loss(actors.policy, treepack.make_batch(row))
            torch.autograd.backward(loss / sum(each.total_weight for each in rows))
        update(actors)


async def sample(actors: Actors, problems: list[Problem], shape: TreeOptions, *, step: int, seed: int) -> list[Tree]:
    """Sample a tree of rollouts for each problem, all side by side."""

    async def grow(problem: Problem) -> Tree:
        async def score(response: Any) -> float:
            return reward(actors.tokenizer.decode(response.tolist()), problem.answer)

        ids = np.array(actors.tokenizer.encode(problem.prompt), np.int32)
        query = Query(key=problem.prompt, group_id=problem.prompt, prompt=ids, step=step)
        return await sample_tree(query, actors.engine, shape, episode=SingleTurn(score), seed=derived_seed(seed, step))

    return list(await asyncio.gather(*map(grow, problems)))


def credit(trees: Sequence[Tree], settings: Settings) -> treepack.Trie:
    """Return the rollouts of `trees` as one prefix trie with the advantage of every rollout, or of every token."""
    trie = treepack.build_trie([rollout for tree in trees for rollout in tree_trajectories(tree)])
    estimator = treepack.AdvantageOptions(settings.estimator, leaf_weights=settings.leaf_weights)
    return with_advantages(trie, estimate_advantages(trie, estimator))


def accumulate(policy: Any, trie: treepack.Trie, settings: Settings) -> dict[str, float]:
    """Add the gradient of the step's loss to the parameters, row by row, and return figures of the step.

    Every (rollout, sampled token) pair is a term of the loss. `factors` divide by the denominator of the whole step, so
    the cut into rows changes nothing.
    """
    objective = choose_objective(settings.loss)
    options = treepack.PackOptions(capacity=settings.capacity, leaf_weights=settings.leaf_weights)
    rows = list(treepack.plan_packing(trie, options))
    sums, gap = Counter[str](), 0.0
    for row, factors in zip(rows, row_factors(rows, objective), strict=True):
        batch = treepack.make_batch(row).to(policy.device)
        terms = batch.terms
        assert terms is not None
        assert terms.sampling_logprob is not None
        with torch.autocast(policy.device.type, torch.bfloat16, enabled=settings.bf16):
            # At the temperature of the sampler; once for each token of the row, however many rollouts share it.
            scores = row_logprobs(policy, batch, terms.tokens, temperature=settings.temperature)
            loss, means = objective_loss(*scores, terms, factors.to(policy.device), objective)
        torch.autograd.backward(loss)
        sums.update({"loss": loss.item(), **{name: value.item() for name, value in means.items()}})
        gap = max(gap, (scores[0].detach()[terms.index] - terms.sampling_logprob).abs().max().item())
    return {
        "loss": sums["loss"],
        "entropy": sums["entropy"] / sums["weight"],
        "sampler_gap": gap,  # largest difference of a log-probability in the engine and here
        "tokens": sum(row.num_tokens for row in rows),
        "tokens_flat": trie.tokens_flat,  # of the same rollouts one by one
    }


def update(actors: Actors) -> float:
    """Take the optimiser step, and return the norm of the gradient before it was clipped."""
    norm = torch.nn.utils.clip_grad_norm_(actors.policy.model.parameters(), 1.0)
    actors.optimiser.step()
    actors.optimiser.zero_grad()
    return norm.item()


async def publish(actors: Actors, version: int) -> None:
    """Give the new weights to the engine, which drops the keys of the old ones."""
    if actors.sampler is not actors.policy.causal:
        with torch.no_grad():
            for copy, weights in zip(actors.sampler.parameters(), actors.policy.causal.parameters(), strict=True):
                copy.copy_(weights)
    await actors.engine.publish(str(version))


async def evaluate(actors: Actors, problems: list[Problem], settings: Settings) -> float:
    """Return the pass rate of independent rollouts of `problems`, which have the same random numbers every time."""
    shape = independent(width=settings.eval_samples, max_tokens=settings.max_tokens)
    trees = await sample(actors, problems, shape, step=0, seed=settings.seed)
    return float(np.mean([leaf.reward == 1 for tree in trees for leaf in tree.leaves]))


def figures(trees: Sequence[Tree]) -> dict[str, float]:
    """Return figures of a step's sampling; the mean reward is that of independent rollouts, by the leaf weights."""
    rewards = [np.dot(weights_of_leaves(tree)[1], [leaf.reward or 0.0 for leaf in tree.leaves]) for tree in trees]
    return {
        "reward": float(np.mean(rewards)),
        "leaves": sum(len(tree.leaves) for tree in trees),
        "decoded": sum(tree.usage.decoded for tree in trees),
    }


async def train(settings: Settings) -> AsyncIterator[dict[str, Any]]:
    """Run the loop, and yield a record after each step; step 0 is the evaluation before the training."""
    rng = np.random.default_rng(settings.seed)
    every = rng.permutation(np.array(make_problems(settings.largest), object)).tolist()
    evaluated, pool = every[: settings.eval_problems], every[settings.held_out :]
    shape = TreeOptions(width=settings.width, segment=settings.segment, max_tokens=settings.max_tokens, depth=None)
    actors = start(settings)
    try:
        if settings.model.endswith(".json"):
            warm_up(actors, pool, settings)
            await publish(actors, 0)
        yield {"step": 0, "pass_rate": await evaluate(actors, evaluated, settings)}
        for step in range(1, settings.steps + 1):
            begin = time.perf_counter()
            problems = [pool[i] for i in rng.choice(len(pool), settings.problems, replace=False)]
            trees = await sample(actors, problems, shape, step=step, seed=settings.seed)
            # A tree whose rewards are all equal has nothing to compare, so it is left out, as in TreePO and DAPO.
            mixed = [tree for tree in trees if len({leaf.reward for leaf in tree.leaves}) > 1]
            record: dict[str, Any] = {"step": step, **figures(trees), "mixed": len(mixed)}
            sampled = time.perf_counter()
            if mixed:
                record |= accumulate(actors.policy, credit(mixed, settings), settings)
                record["grad_norm"] = update(actors)
                await publish(actors, step)
            record |= {"sample_seconds": sampled - begin, "train_seconds": time.perf_counter() - sampled}
            if step % settings.eval_every == 0 or step == settings.steps:
                record["pass_rate"] = await evaluate(actors, evaluated, settings)
            yield record
        if settings.save:
            actors.policy.model.save_pretrained(settings.save)
    finally:
        await actors.engine.close()


def read_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Return the settings of the command line, or of `arguments`: an option for each field."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    types = get_type_hints(Settings)
    for field in fields(Settings):
        how: dict[str, Any] = {"action": "store_true"} if types[field.name] is bool else {"type": types[field.name]}
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=field.default, help=f"{field.default}", **how)
    return Settings(**vars(parser.parse_args(arguments)))


async def main(settings: Settings) -> None:
    """Print the records of the loop as JSON lines."""
    async for record in train(settings):
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    asyncio.run(main(read_settings()))
