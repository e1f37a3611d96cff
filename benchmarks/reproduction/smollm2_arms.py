"""The arms of the SmolLM2 demonstration: sample, credit, train and publish, with one process, model and sampler.

    problems --sample--> trees --credit--> trie --accumulate--> gradients --step--> weights --publish--> sampler

    independent  independent rollouts, advantages of GRPO           every arm has the same problems in the same order,
    tree         TreePO's trees, advantages of TreePO               the same leaves of a problem and the same loss
    tree-grpo    TreePO's trees, advantages of GRPO

`run_arm` yields a record after each step. A tree whose rewards are all equal is sampled and counted, but not trained.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode import DecodeEngine
from smollm2_sums import ADDENDS, LARGEST, MAX_TOKENS, Sum, chat_record
from torch import Tensor

from treepack import AdvantageOptions, PackOptions, TreeOptions, Trie, build_trie, load_model, make_batch, plan_packing
from treepack.ingest.readers.files.records import Record
from treepack.model.forward import row_logprobs
from treepack.model.objectives.losses import objective_loss
from treepack.model.objectives.objective import choose_objective
from treepack.model.objectives.row_factors import row_factors
from treepack.pack.row import Row
from treepack.rl.advantages.estimate import estimate_advantages, with_advantages
from treepack.rollout.engine import Sampling, derived_seed
from treepack.rollout.episode import SingleTurn
from treepack.rollout.in_process.local import default_stop_tokens
from treepack.rollout.options import independent as independent_options
from treepack.rollout.prompts import PromptReader
from treepack.rollout.query import Query
from treepack.rollout.records import tree_trajectories
from treepack.rollout.sampler import sample_tree
from treepack.rollout.tree import Tree, weights_of_leaves
from treepack.trajectory import Float64, Int32

INDEPENDENT, TREE, TREE_GRPO = "independent", "tree", "tree-grpo"
ESTIMATORS = {INDEPENDENT: "grpo", TREE: "treepo", TREE_GRPO: "grpo"}
MAX_ROWS = 1024  # sequences that the decoder runs at once; more wait
# One mean over the tokens of the step, without the entropy bonus or a reference: only sampling and credit differ.
OBJECTIVE = choose_objective("dapo")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a step and of an evaluation.

    `problems` trees of `width` leaves each; `segment` tokens between two forks; `capacity` tokens of a packed row. The
    learning rate `rate` is constant. Every `eval_every` steps, `eval_samples` independent rollouts of each of
    `eval_problems` problems are sampled.
    """

    problems: int = 64
    width: int = 8
    segment: int = 8
    max_tokens: int = MAX_TOKENS
    capacity: int = 16_384
    rate: float = 1e-5
    clip: float = 1.0
    eval_problems: int = 256
    eval_samples: int = 4
    eval_every: int = 10


@dataclass(frozen=True, slots=True)
class Actors:
    """Everything that all arms use: `policy` is trained, and `engine` samples from the weights of `sampler`.

    `prompts` renders prompts with the chat template of `tokenizer`.
    """

    policy: Any
    sampler: Any
    engine: DecodeEngine
    tokenizer: Any
    prompts: PromptReader

    def prompt(self, problem: Sum) -> Int32:
        """Return the prompt as `treepack build-trie` renders and tokenises it, int32 [n]."""
        return prompt_ids(self.prompts, problem)


def start(model: Path, *, device: str, sizes: Sizes) -> Actors:
    """Load the model, its tokenizer and a decoder of its weights.

    On a GPU the policy computes under autocast, and the decoder reads a copy of its weights in bfloat16.
    """
    from treepack.ingest.tokenization import load_tokenizer

    low = torch.bfloat16 if torch.device(device).type == "cuda" else None
    policy = load_model(model, device=device, autocast=low)
    sampler = policy.causal if low is None else load_model(model, dtype=low, device=device).causal
    tokenizer = load_tokenizer(str(model))
    prompts = PromptReader(tokenizer)
    longest = len(prompt_ids(prompts, Sum((LARGEST,) * max(ADDENDS)))) + sizes.max_tokens
    rows = min(MAX_ROWS, max(sizes.problems * sizes.width, sizes.eval_problems * sizes.eval_samples))
    sampling = Sampling(stop_token_ids=default_stop_tokens(model))
    return Actors(policy, sampler, DecodeEngine(sampler, sampling, rows=rows, longest=longest), tokenizer, prompts)


def prompt_ids(prompts: PromptReader, problem: Sum) -> Int32:
    """Return the token ids of a problem's prompt, int32 [n]."""
    prompt = prompts.read(Record(problem.name, problem.name, chat_record(problem, solved=False)))
    assert prompt is not None
    return prompt.ids


def publish(actors: Actors, version: str) -> None:
    """Copy the policy's weights to the sampler, unless they are the same tensors."""
    if actors.sampler is not actors.policy.causal:
        with torch.no_grad():
            for copy, weights in zip(actors.sampler.parameters(), actors.policy.causal.parameters(), strict=True):
                copy.copy_(weights)
    asyncio.run(actors.engine.publish(version))


def sample(actors: Actors, some: Sequence[Sum], shape: TreeOptions, *, step: int, seed: int) -> list[Tree]:
    """Sample a tree for each problem, all side by side."""

    async def grow(problem: Sum) -> Tree:
        async def score(response: Any) -> float:
            return problem.reward(actors.tokenizer.decode(response.tolist(), skip_special_tokens=True))

        query = Query(key=problem.name, group_id=problem.name, prompt=actors.prompt(problem), step=step)
        return await sample_tree(query, actors.engine, shape, episode=SingleTurn(score), seed=derived_seed(seed, step))

    async def grow_all() -> list[Tree]:
        return list(await asyncio.gather(*map(grow, some)))

    return asyncio.run(grow_all())


def shape_of(arm: str, sizes: Sizes) -> TreeOptions:
    """Return the shape of an arm's trees."""
    if arm == INDEPENDENT:
        return independent_options(width=sizes.width, max_tokens=sizes.max_tokens)
    return TreeOptions(width=sizes.width, segment=sizes.segment, max_tokens=sizes.max_tokens, depth=None)


def evaluate(actors: Actors, held_out: Sequence[Sum], sizes: Sizes, *, seed: int) -> Float64:
    """Return the pass rate of independent rollouts of each problem, float64 [n], with the same seeds every time."""
    shape = independent_options(width=sizes.eval_samples, max_tokens=sizes.max_tokens)
    trees = sample(actors, held_out, shape, step=0, seed=seed)
    return np.array([np.mean([leaf.reward or 0.0 for leaf in tree.leaves]) for tree in trees])


def credit(trees: Sequence[Tree], estimator: str) -> Trie:
    """Return the rollouts of `trees` as a trie with advantages."""
    trie = build_trie([rollout for tree in trees for rollout in tree_trajectories(tree)])
    return with_advantages(trie, estimate_advantages(trie, AdvantageOptions(estimator)))


def mixed(trees: Sequence[Tree]) -> list[Tree]:
    """Return the trees whose leaves have different rewards."""
    return [tree for tree in trees if len({leaf.reward for leaf in tree.leaves}) > 1]


def accumulate(policy: Any, rows: Sequence[Row]) -> dict[str, float]:
    """Add the gradient of the loss of a step of `rows` to the parameters.

    Returns:
        The loss, and the mean distance between the log-probabilities of the trainer and of the sampler.
    """
    sums = Counter[str]()
    for row, factors in zip(rows, row_factors(rows, OBJECTIVE), strict=True):
        batch = make_batch(row).to(policy.device)
        terms = batch.terms
        assert terms is not None
        assert terms.sampling_logprob is not None
        with torch.autocast("cuda", torch.bfloat16, enabled=policy.device.type == "cuda"):
            logprobs, entropies = row_logprobs(policy, batch, terms.tokens)
            loss, _ = objective_loss(logprobs, entropies, terms, factors.to(policy.device), OBJECTIVE)
        loss.backward()  # type: ignore[no-untyped-call]
        gaps: Tensor = (logprobs.detach()[terms.index] - terms.sampling_logprob).abs()
        sums.update({"loss": loss.item(), "gap": gaps.sum().item(), "terms": len(gaps)})
    return {"loss": sums["loss"], "sampler_gap": sums["gap"] / max(1, sums["terms"])}


def run_arm(
    actors: Actors,
    arm: str,
    sizes: Sizes,
    *,
    stream: Iterator[Sum],
    held_out: Sequence[Sum],
    seed: int,
    enough: Callable[[dict[str, Any]], bool],
) -> Iterator[dict[str, Any]]:
    """Train the policy in place, and yield a record after each step; step 0 is the evaluation before the training.

    Args:
        actors: model and sampler.
        arm: a name of `ESTIMATORS`.
        sizes: sizes of the steps.
        stream: the problems to train on.
        held_out: the problems of the evaluations; their pass rates are the field `passed` of a record.
        seed: seed of the sampler.
        enough: gets the record of a step and returns True to end the arm; the last step is evaluated too.
    """
    optimiser = torch.optim.AdamW(actors.policy.model.parameters(), lr=sizes.rate, weight_decay=0.0)
    publish(actors, "0")
    passed = evaluate(actors, held_out, sizes, seed=seed)
    yield {"arm": arm, "step": 0, "decoded": 0, "seconds": 0.0, "passed": passed.tolist()}
    decoded, seconds = 0, 0.0
    for step in range(1, 1 << 62):
        begin, prefilled = time.perf_counter(), actors.engine.counts.prefilled
        trees = sample(actors, list(islice(stream, sizes.problems)), shape_of(arm, sizes), step=step, seed=seed)
        sampled = time.perf_counter()
        record: dict[str, Any] = {"arm": arm, "step": step, **sampled_figures(trees)}
        record["prefilled"] = actors.engine.counts.prefilled - prefilled
        if chosen := mixed(trees):
            trie = credit(chosen, ESTIMATORS[arm])
            rows = list(plan_packing(trie, PackOptions(capacity=sizes.capacity)))
            record |= {"tokens_flat": trie.tokens_flat, "tokens_tree": trie.tokens_tree}
            record |= {"tokens_packed": sum(row.num_tokens for row in rows)}
            record |= accumulate(actors.policy, rows)
            norm = torch.nn.utils.clip_grad_norm_(actors.policy.model.parameters(), sizes.clip)
            record["grad_norm"] = norm.item()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            publish(actors, str(step))
        end = time.perf_counter()
        decoded, seconds = decoded + record["step_decoded"], seconds + end - begin
        record |= {"sample_seconds": sampled - begin, "train_seconds": end - sampled}
        record |= {"decoded": decoded, "seconds": seconds}
        last = enough(record)
        if last or step % sizes.eval_every == 0:
            record["passed"] = evaluate(actors, held_out, sizes, seed=seed).tolist()
        yield record
        if last:
            return


def sampled_figures(trees: Sequence[Tree]) -> dict[str, float]:
    """Return figures of a step's sampling; the mean reward is that of independent rollouts, by the leaf weights."""
    rewards = [float(weights_of_leaves(tree)[1] @ [leaf.reward or 0.0 for leaf in tree.leaves]) for tree in trees]
    return {
        "reward": float(np.mean(rewards)),
        "leaves": sum(len(tree.leaves) for tree in trees),
        "trees": len(trees),
        "mixed": len(mixed(trees)),
        "step_decoded": sum(tree.usage.decoded for tree in trees),
    }
