"""Tokens decoded and wall clock of TreePO's sampler beside independent sampling, with transformers' engine on a GPU.

    python benchmarks/tree_sampling.py [--queries 64] [--width 16] [--mean 700] [--scale 1] [--requests 1024]
                                       [--arms "NAME;NAME"] [--steps] [--unchecked]

The model has the shape of Qwen3-0.6B and random weights in bfloat16, so its responses have no natural length. A wrapper
around the engine draws from a log-normal law whether and where each continuation ends, given the length of its path,
and requests exactly that many tokens. So every arm samples responses of one law, forks share their past, and the
engine decodes real tokens. A path has at most 7168 tokens after a prompt of 256. All arms have the same number of
leaves for each query, except the one without a fallback. --scale 4 divides these lengths and the segments' by
4, so that the machine is busy in spite of the few longest paths.

First it checks the engine's log-probabilities against a forward pass of the same weights: float32 within 1e-5 and
bfloat16 within 1e-2 on average. It needs torch, transformers and numpy.

decoded / leaf  tokens that the engine sampled for a leaf, and against the independent arm
seconds         of the whole arm, and for a leaf against the independent arm
tokens / step   tokens that a forward pass of the engine decoded on average
leaf length     plain mean over the leaves, and weighted by the leaves before the first fallback
cached          share of the requests' tokens whose keys came from the engine's pages
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import time
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from treepack.rollout.engine import STOP, Engine, Segment
from treepack.rollout.episode import SingleTurn
from treepack.rollout.in_process.local import LocalEngine, LocalOptions
from treepack.rollout.options import Sampling, TreeOptions, independent
from treepack.rollout.query import Query
from treepack.rollout.requests import LimitedEngine
from treepack.rollout.sampler import sample_tree
from treepack.rollout.simulated import LengthLaw, log_normal_lengths
from treepack.rollout.tree import Tree, mean_decoded, weights_of_leaves
from treepack.trajectory import Int32

LONGEST = 7168
NUM_PROMPT = 256
SIGMA = 0.6  # of the logarithm of the lengths
SHAPE: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}


class LawLengths:
    """An engine whose continuations end as a law of lengths demands, instead of at a stop token."""

    def __init__(self, engine: Engine, law: LengthLaw) -> None:
        self.engine = engine
        self.law = law
        self._prompts: set[bytes] = set()

    @property
    def sampling(self) -> Sampling:
        """The distribution of the engine."""
        return self.engine.sampling

    async def extend(self, ids: Int32, *, count: int, max_tokens: int, seed: int) -> list[Segment]:
        """Draw the length of each continuation, and let the engine decode as many tokens."""
        if ids.tobytes() not in self._prompts and len(ids) == self.law.num_prompt:
            # Continuations of different lengths are separate requests: one computes the prompt for all of them. Some
            # versions of transformers do not keep the pages that a request completes in its last step.
            self._prompts.add(ids.tobytes())
            await self.engine.extend(ids, count=1, max_tokens=2, seed=seed)
        drawn = [
            self.law.sample(ids, max_tokens=max_tokens, rng=np.random.default_rng([seed, number]))[0]
            for number in range(count)
        ]
        answers = await asyncio.gather(
            *(
                self.engine.extend(ids, count=1, max_tokens=len(tokens), seed=seed + number)
                for number, tokens in enumerate(drawn)
            )
        )
        return [
            dataclasses.replace(segment, finish=STOP) if tokens[-1] == self.law.stop else segment
            for tokens, (segment,) in zip(drawn, answers, strict=True)
        ]

    async def publish(self, version: str) -> None:
        """Announce new weights to the engine."""
        self._prompts.clear()
        await self.engine.publish(version)

    async def close(self) -> None:
        """Close the engine."""
        await self.engine.close()


def arms(width: int, scale: int) -> dict[str, TreeOptions]:
    """Return the samplers that are compared, by name; the first one is independent sampling.

    Names have the lengths of scale 1.
    """

    def tree(depth: int, segment: int, first: int | tuple[int, int], fallback: str = "random") -> TreeOptions:
        return TreeOptions(
            width=width,
            max_tokens=LONGEST // scale,
            segment=segment // scale,
            depth=depth,
            first_forks=first,
            fallback=fallback,
        )

    return {
        "independent": independent(width=width, max_tokens=LONGEST // scale),
        "7 x 1024, first 2": tree(7, 1024, 2),
        "14 x 512, first 2": tree(14, 512, 2),
        "28 x 256, first 2": tree(28, 256, 2),
        "14 x 512, first 2-8": tree(14, 512, (2, 8)),
        "14 x 512, first 16": tree(14, 512, 16),
        "14 x 512, first 2, no fallback": tree(14, 512, 2, "none"),
    }


def build_model(dtype: torch.dtype, device: str, **changes: Any) -> Qwen3ForCausalLM:
    """Return a model of the shape of Qwen3-0.6B with random weights."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(Qwen3Config(**SHAPE | changes), dtype=dtype)
    return model.eval()


async def check_logprobs(dtype: torch.dtype, device: str, bound: float) -> str:
    """Return a line with the differences from a forward pass over forks, shared prompts and cached segments.

    Their mean must be within `bound`. In bfloat16 a single one may exceed it: logits of 2 to 4 are multiples of 1/64.
    The line also has the difference of that forward pass from one in float32.
    """
    model = build_model(dtype, device, num_hidden_layers=8)
    exact = build_model(dtype, device, num_hidden_layers=8).float()
    engine = LocalEngine(model, Sampling(temperature=0.7), options=LocalOptions(cache_tokens=8192))
    rng = np.random.default_rng(0)
    differences: list[torch.Tensor] = []
    rounding: list[torch.Tensor] = []

    def forward(causal: Qwen3ForCausalLM, ids: torch.Tensor, start: int) -> torch.Tensor:
        with torch.no_grad():
            logprobs = (causal(ids).logits[0].float() / 0.7).log_softmax(-1)
        chosen: torch.Tensor = logprobs[start - 1 : -1].gather(1, ids[0, start:, None])
        return chosen[:, 0].cpu()

    async def one(num_prompt: int) -> None:
        ids = rng.integers(0, SHAPE["vocab_size"], num_prompt).astype(np.int32)
        for _ in range(2):
            (first, _) = await engine.extend(ids, count=2, max_tokens=60, seed=num_prompt)
            whole = torch.from_numpy(np.concatenate([ids, first.tokens])).long().to(device)[None]
            expected = forward(model, whole, len(ids))
            assert first.logprobs is not None
            differences.append((expected - torch.from_numpy(first.logprobs)).abs())
            rounding.append((expected - forward(exact, whole, len(ids))).abs())
            ids = whole[0].int().cpu().numpy()

    await asyncio.gather(*(one(num_prompt) for num_prompt in (5, 40, 97, 300)))
    await engine.close()
    engine_error, forward_error = torch.cat(differences), torch.cat(rounding)
    mean, largest = float(engine_error.mean()), float(engine_error.max())
    noise, most_noise = float(forward_error.mean()), float(forward_error.max())
    assert mean <= bound, f"log-probabilities differ by {mean} on average in {dtype}"
    assert largest <= max(bound, 3 * most_noise), f"a log-probability differs by {largest} in {dtype}"
    return (
        f"log-probabilities, {dtype}: mean difference {mean:.1e}, largest {largest:.1e} over {len(engine_error)} "
        f"tokens; of the forward pass from float32 {noise:.1e} and {most_noise:.1e}"
    )


@dataclasses.dataclass
class Outcome:
    """The trees of one arm and their time."""

    name: str
    trees: list[Tree]
    seconds: float
    num_steps: int

    def row(self, base: Outcome | None) -> str:
        """Return a line of the table; `base` is the outcome of independent sampling."""
        leaves = sum(len(tree.leaves) for tree in self.trees)
        decoded = sum(tree.usage.decoded for tree in self.trees)
        sent = sum(tree.usage.prefilled for tree in self.trees)
        cached = sum(tree.usage.cached or 0 for tree in self.trees)
        fallback = sum(leaf.is_fallback for tree in self.trees for leaf in tree.leaves)
        plain = np.mean([leaf.end - tree.root.end for tree in self.trees for leaf in tree.leaves])
        weighted = np.mean([mean_decoded(tree) for tree in self.trees])
        assert all(abs(weights_of_leaves(tree)[0].sum() - 1) < 1e-9 for tree in self.trees)
        per_leaf, seconds = decoded / leaves, self.seconds / leaves
        relative = "" if base is None else f"{per_leaf / base.decoded_per_leaf - 1:+.0%}"
        clock = "" if base is None else f"{seconds / (base.seconds / base.num_leaves) - 1:+.0%}"
        return (
            f"| {self.name} | {leaves} | {per_leaf:,.0f} | {relative} | {self.seconds:.0f} | {clock} "
            f"| {self.num_steps:,} | {decoded / self.num_steps:.0f} | {1000 * self.seconds / self.num_steps:.0f} "
            f"| {plain:,.0f} | {weighted:,.0f} | {fallback / leaves:.0%} "
            f"| {cached / sent:.0%} |"
        )

    @property
    def num_leaves(self) -> int:
        """Leaves of all trees."""
        return sum(len(tree.leaves) for tree in self.trees)

    @property
    def decoded_per_leaf(self) -> float:
        """Tokens that the engine sampled for a leaf."""
        return sum(tree.usage.decoded for tree in self.trees) / self.num_leaves


HEADER = (
    "| sampler | leaves | decoded / leaf | vs independent | seconds | per leaf | steps | tokens / step "
    "| ms / step | leaf length | weighted | fallback leaves | cached |\n|" + "---|" * 13
)


async def run_arm(name: str, options: TreeOptions, engine: Engine, local: LocalEngine, queries: list[Query]) -> Outcome:
    """Sample all queries at once, with an empty cache at the start. `local` is the engine at the bottom of `engine`."""
    await engine.publish(name)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    trees = await asyncio.gather(*(sample_tree(query, engine, options, episode=SingleTurn()) for query in queries))
    return Outcome(name, list(trees), time.perf_counter() - begin, local.num_steps)


def make_queries(number: int, num_prompt: int = NUM_PROMPT) -> list[Query]:
    """Return prompts of random tokens."""
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, SHAPE["vocab_size"], (number, num_prompt)).astype(np.int32)
    return [Query(f"q{i}", f"q{i}", prompt) for i, prompt in enumerate(prompts)]


def steps_table(engine: LocalEngine, device: str) -> str:
    """Return the milliseconds of a decoding step over the number of requests, and the share of time in GPU kernels."""
    lines = ["| requests | ms a step | tokens / s | ms of kernels |", "|---|---|---|---|"]
    for requests in (1, 16, 64, 256, 512):

        async def decode(number: int = requests, max_tokens: int = 64) -> None:
            queries = make_queries(number)
            await asyncio.gather(*(engine.extend(q.prompt, count=1, max_tokens=max_tokens, seed=0) for q in queries))

        loop = asyncio.get_event_loop()
        loop.run_until_complete(decode())
        activities = [torch.profiler.ProfilerActivity.CUDA] if device == "cuda" else []
        begin = time.perf_counter()
        loop.run_until_complete(decode())
        seconds = time.perf_counter() - begin
        kernels = float("nan")
        if activities:
            with torch.profiler.profile(activities=activities) as profile:
                loop.run_until_complete(decode(max_tokens=8))
            kernels = sum(event.self_device_time_total for event in profile.key_averages()) / 1000 / 8
        lines.append(f"| {requests} | {1000 * seconds / 64:.1f} | {64 * requests / seconds:,.0f} | {kernels:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Check, then run the arms and print their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--mean", type=float, default=700.0, help="mean length of a response, tokens")
    parser.add_argument("--arms", default="all", help="names of the table's rows, separated by ';'")
    parser.add_argument("--steps", action="store_true", help="also print the time of single steps")
    parser.add_argument("--scale", type=int, default=1, help="divide all lengths by this number")
    parser.add_argument("--requests", type=int, default=1024, help="maximum number of continuations at a time")
    parser.add_argument("--unchecked", action="store_true", help="do not check the log-probabilities")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    for dtype, bound in () if args.unchecked else ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        print(loop.run_until_complete(check_logprobs(dtype, device, bound)), flush=True)

    engine = LocalEngine(build_model(torch.bfloat16, device), Sampling())
    if args.steps:
        print(steps_table(engine, device), flush=True)
    lengths = log_normal_lengths(mean=args.mean / args.scale, sigma=SIGMA, longest=LONGEST // args.scale)
    num_prompt = NUM_PROMPT // args.scale
    limited = LimitedEngine(engine, max_requests=args.requests, attempts=1, timeout=3600)
    lawful = LawLengths(limited, LengthLaw(lengths, num_prompt=num_prompt))
    queries = make_queries(args.queries, num_prompt)
    all_arms = arms(args.width, args.scale)
    chosen = {name: arm for name, arm in all_arms.items() if args.arms == "all" or name in args.arms.split(";")}
    print(f"\n{args.queries} queries, mean length {args.mean:g} / {args.scale}\n{HEADER}", flush=True)
    base: Outcome | None = None
    for name, options in chosen.items():
        outcome = loop.run_until_complete(run_arm(name, options, lawful, engine, queries))
        print(outcome.row(base), flush=True)
        base = base or outcome
    loop.run_until_complete(lawful.close())


if __name__ == "__main__":
    main()
