"""Decoded tokens per second of the fast decoder, after a comparison with transformers' own forward pass.

    python benchmarks/reproduction/probe.py [--sequences 256 1024 2048] [--tokens 128] [--shape small] [--dry-run]

It takes less than a minute on a GPU. The policy has random weights and no stop tokens, so every sequence has the same
length after a prompt of 40 tokens. Each row of the table is the faster of two runs; the first run, which makes the CUDA
graphs, counts only in its own column. --dry-run takes the same way through the code with small numbers, for a CPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode import DecodeEngine, Request
from policy import SHAPES, make_policy
from words import WORDS

from treepack.rollout.engine import Sampling

NUM_PROMPT = 40
LARGEST_ERROR = 1e-3  # of a log-probability, in float32: sums in another order, over some thousand tokens


def main() -> None:
    """Compare, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    if options.dry_run:
        options.sequences, options.tokens, options.shape = [8, 32], 12, "test"
    model = make_policy(options.shape, seed=0).to(options.device)
    name = torch.cuda.get_device_name() if options.device != "cpu" else "CPU"
    print(f"{' '.join(sys.argv)}\n{name}, torch {torch.__version__}, commit {commit()}\n")
    engine = DecodeEngine(model, Sampling(), rows=max(options.sequences), longest=NUM_PROMPT + options.tokens)
    error = largest_error(model, engine, options.tokens)
    print(f"largest error of a log-probability: {error:.1e}\n")
    if error > LARGEST_ERROR:
        raise SystemExit(f"error: expected log-probabilities within {LARGEST_ERROR:g}; the timings would mean nothing")
    print("| sequences | first run, s | run, s | ms / step | decoded tokens / s |")
    print("|---|---|---|---|---|")
    for number in options.sequences:
        requests = made_requests(number, options.tokens)
        first, *again = (seconds(engine, requests) for _ in range(3))
        best = min(again)
        tokens = number * options.tokens
        print(
            f"| {number:,} | {first:.2f} | {best:.3f} | {1e3 * best / options.tokens:.2f} | {tokens / best:,.0f} |",
            flush=True,
        )
    if options.device != "cpu":
        print(f"\npeak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


def made_requests(number: int, tokens: int) -> list[Request]:
    """Return requests of `number` continuations in total, eight of each prompt."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, len(WORDS), (number // 8, NUM_PROMPT)).astype(np.int32)
    return [Request(ids, 8, tokens, seed) for seed, ids in enumerate(prompts)]


def seconds(engine: DecodeEngine, requests: Sequence[Request]) -> float:
    """Return the seconds of a batch; the answers are on the CPU, so nothing is left to wait for."""
    begin = time.perf_counter()
    engine.decode(requests)
    return time.perf_counter() - begin


def largest_error(model: Any, engine: DecodeEngine, tokens: int) -> float:
    """Return the largest difference of the decoder's log-probabilities from those of transformers' forward pass.

    The prompts have different lengths, and most continuations end before the longest one, so rows move.
    """
    requests = [
        Request(np.arange(2, 3 + size, dtype=np.int32), 1, 1 + tokens * (size % 8 == 0), size)
        for size in range(NUM_PROMPT)
    ]
    errors = []
    for request, (segment,) in zip(requests, engine.decode(requests), strict=True):
        ids = torch.from_numpy(np.concatenate([request.ids, segment.tokens]).astype(np.int64)).to(model.device)
        with torch.no_grad():
            logprobs = model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1)
        expected = logprobs.gather(1, ids[1:, None]).squeeze(1)[-len(segment.tokens) :]
        assert segment.logprobs is not None
        errors.append(np.abs(segment.logprobs - expected.cpu().numpy()).max())
    return float(np.max(errors))


def commit() -> str:
    """Return the short name of the commit, or "unknown" outside of a clone."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
