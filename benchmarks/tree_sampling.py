"""Tokens decoded and wall clock of TreePO's sampler beside independent sampling, with transformers' engine on a GPU.

    python benchmarks/tree_sampling.py [--queries 32] [--width 16] [--mean 700] [--arms "NAME;NAME"] [--steps]

The model has the shape of Qwen3-0.6B and random weights in bfloat16, so its responses have no natural length. A wrapper
around the engine draws from a log-normal law whether and where each continuation ends, given the length of its path,
and requests exactly that many tokens. So every arm samples responses of one law, forks share their past, and the
engine decodes real tokens. A path has at most 7168 tokens. All arms have the same number of leaves for each query.

First it checks the engine's log-probabilities against a forward pass of the same weights: float32 within 1e-5 and
bfloat16 within 1e-2. It needs torch, transformers and numpy.

decoded         tokens that the engine sampled for a leaf
vs independent  decoded / mean length of the law's responses that the independent arm sampled, minus 1
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

from treepack.rollout.engine import STOP, Engine, Sampling, Segment
from treepack.rollout.episode import SingleTurn
from treepack.rollout.local import LocalEngine, LocalOptions
from treepack.rollout.options import TreeOptions, independent
from treepack.rollout.query import Query
from treepack.rollout.sampler import sample_tree
from treepack.rollout.simulated import LengthLaw, log_normal_lengths
from treepack.rollout.tree import Tree, leaf_weights, mean_decoded
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
    """An engine whose continuations end where a law of lengths says, instead of at a stop token."""

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
            # Continuations of different lengths are separate requests: one computes the prompt for all of them.
            self._prompts.add(ids.tobytes())
            await self.engine.extend(ids, count=1, max_tokens=1, seed=seed)
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


def arms(width: int) -> dict[str, TreeOptions]:
    """Return the samplers that are compared, by name; the first one is independent sampling."""

    def tree(depth: int, segment: int, first: int | tuple[int, int], fallback: str = "random") -> TreeOptions:
        return TreeOptions(
            width=width, max_tokens=LONGEST, segment=segment, depth=depth, first_forks=first, fallback=fallback
        )

    return {
        "independent": independent(width=width, max_tokens=LONGEST),
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
    """Return a line with the largest difference from a forward pass; forks, shared prompts and cached ones."""
    model = build_model(dtype, device, num_hidden_layers=8)
    options = LocalOptions(cache_tokens=8192)
    engine = LocalEngine(model, Sampling(temperature=0.7), options=options)
    rng = np.random.default_rng(0)
    worst, num_tokens = 0.0, 0

    async def one(num_prompt: int) -> None:
        nonlocal worst, num_tokens
        ids = rng.integers(0, SHAPE["vocab_size"], num_prompt).astype(np.int32)
        for _ in range(2):
            (first, _) = await engine.extend(ids, count=2, max_tokens=60, seed=num_prompt)
            whole = torch.from_numpy(np.concatenate([ids, first.tokens])).long().to(device)[None]
            with torch.no_grad():
                logprobs = (model(whole).logits[0].float() / 0.7).log_softmax(-1)
            expected = logprobs[len(ids) - 1 : -1].gather(1, whole[0, len(ids) :, None])[:, 0]
            assert first.logprobs is not None
            worst = max(worst, float((expected.cpu() - torch.from_numpy(first.logprobs)).abs().max()))
            num_tokens += len(first.tokens)
            ids = whole[0].int().cpu().numpy()

    await asyncio.gather(*(one(num_prompt) for num_prompt in (5, 40, 97, 300)))
    await engine.close()
    assert worst <= bound, f"log-probabilities differ by {worst} in {dtype}"
    return f"log-probabilities, {dtype}: largest difference {worst:.1e} over {num_tokens} tokens (bound {bound:g})"


@dataclasses.dataclass
class Outcome:
    """The trees of one arm and their time."""

    name: str
    trees: list[Tree]
    seconds: float

    def row(self, base: Outcome | None) -> str:
        """Return a line of the table; `base` is the outcome of independent sampling."""
        leaves = sum(len(tree.leaves) for tree in self.trees)
        decoded = sum(tree.usage.decoded for tree in self.trees)
        sent = sum(tree.usage.prefilled for tree in self.trees)
        cached = sum(tree.usage.cached or 0 for tree in self.trees)
        fallback = sum(leaf.is_fallback for tree in self.trees for leaf in tree.leaves)
        plain = np.mean([leaf.end - NUM_PROMPT for tree in self.trees for leaf in tree.leaves])
        weighted = np.mean([mean_decoded(tree) for tree in self.trees])
        assert all(abs(leaf_weights(tree)[0].sum() - 1) < 1e-9 for tree in self.trees)
        per_leaf, seconds = decoded / leaves, self.seconds / leaves
        relative = "" if base is None else f"{per_leaf / base.decoded_per_leaf - 1:+.0%}"
        clock = "" if base is None else f"{seconds / (base.seconds / base.num_leaves) - 1:+.0%}"
        return (
            f"| {self.name} | {leaves} | {per_leaf:,.0f} | {relative} | {self.seconds:.0f} | {clock} "
            f"| {decoded / self.seconds:,.0f} | {plain:,.0f} | {weighted:,.0f} | {fallback / leaves:.0%} "
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
    "| sampler | leaves | decoded / leaf | vs independent | seconds | per leaf | tokens / s | leaf length "
    "| weighted | fallback leaves | cached |\n|" + "---|" * 11
)


async def run_arm(name: str, options: TreeOptions, engine: Engine, queries: list[Query], seed: int) -> Outcome:
    """Sample all queries at once, with an empty cache at the start."""
    await engine.publish(name)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    trees = await asyncio.gather(
        *(sample_tree(query, engine, options, episode=SingleTurn(), seed=seed) for query in queries)
    )
    return Outcome(name, list(trees), time.perf_counter() - begin)


def make_queries(number: int) -> list[Query]:
    """Return prompts of random tokens."""
    rng = np.random.default_rng(1)
    return [
        Query(f"q{i}", f"q{i}", rng.integers(0, SHAPE["vocab_size"], NUM_PROMPT).astype(np.int32))
        for i in range(number)
    ]


def steps_table(engine: LocalEngine, device: str) -> str:
    """Return the milliseconds of a decoding step over the number of requests, and the share of time in GPU kernels."""
    lines = ["| requests | ms a step | tokens / s | ms of kernels |", "|---|---|---|---|"]
    for requests in (1, 16, 64, 256, 512):

        async def decode(number: int = requests) -> None:
            queries = make_queries(number)
            await asyncio.gather(*(engine.extend(q.prompt, count=1, max_tokens=64, seed=0) for q in queries))

        loop = asyncio.get_event_loop()
        loop.run_until_complete(decode())
        activities = [torch.profiler.ProfilerActivity.CUDA] if device == "cuda" else []
        begin = time.perf_counter()
        loop.run_until_complete(decode())
        seconds = time.perf_counter() - begin
        kernels = float("nan")
        if activities:
            with torch.profiler.profile(activities=activities) as profile:
                loop.run_until_complete(decode())
            kernels = sum(event.self_device_time_total for event in profile.key_averages()) / 1000 / 64
        lines.append(f"| {requests} | {1000 * seconds / 64:.1f} | {64 * requests / seconds:,.0f} | {kernels:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Check, then run the arms and print their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=32)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--mean", type=float, default=700.0, help="mean length of a response, tokens")
    parser.add_argument("--arms", default="all", help="names of the table's rows, separated by ';'")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", action="store_true", help="also print the time of single steps")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        print(loop.run_until_complete(check_logprobs(dtype, device, bound)), flush=True)

    engine = LocalEngine(build_model(torch.bfloat16, device, num_hidden_layers=args.layers), Sampling())
    if args.steps:
        print(steps_table(engine, device), flush=True)
    lengths = log_normal_lengths(mean=args.mean, sigma=SIGMA, longest=LONGEST)
    lawful = LawLengths(engine, LengthLaw(lengths, num_prompt=NUM_PROMPT))
    queries = make_queries(args.queries)
    chosen = {name: arm for name, arm in arms(args.width).items() if args.arms == "all" or name in args.arms.split(";")}
    print(f"\n{args.queries} queries x {args.width} leaves, mean length {args.mean:g}\n{HEADER}", flush=True)
    base: Outcome | None = None
    for name, options in chosen.items():
        outcome = loop.run_until_complete(run_arm(name, options, lawful, queries, args.seed))
        print(outcome.row(base), flush=True)
        base = base or outcome
    loop.run_until_complete(lawful.close())


if __name__ == "__main__":
    main()
