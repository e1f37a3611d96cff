"""Rollouts of 65,536 tokens whose history was edited K times: one row of the tree against one pass for each branch.

    python benchmarks/edited_histories.py [--model qwen3-1.7b | config.json] [--edits 2,5,10] [--repeats N]
    python benchmarks/edited_histories.py --dry-run      a tiny model in float64 on the CPU, rollouts of 1,024 tokens

A prompt of 1/8 of the tokens and 56 turns, each of 5/8 observation and 3/8 answer, are cut into K + 1 segments:

    summary    at each edit the model writes 1/128 of the tokens about its segment, which take the segment's place
    answers    at each edit the observations of the segment are evicted, and its answers stay

    prompt -+- turns 0, summary 0                          branch 0
            '- summary 0 -+- turns 1, summary 1            branch 1      answers and written summaries are trained, once
                          '- summary 1 - turns 2           branch 2

Branches: K + 1 passes forward and backward, each of one branch alone, through varlen FlashAttention. Row: all branches
as one tree. Both ways run the trainer's layers, loss and AdamW. The losses must agree, or the run fails.

operations   of forward and backward, branches over row (costs.model_cost)
loss, grad   relative difference of the two losses, and of the two gradients (norm of the difference over the norm)
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from flat_sequences import flash_attention_4
from measure import commit, device_name, seconds_of
from torch import Tensor
from train_step import DRY_RUN_MODEL, POSITIONS, as_chains, work_of
from training_rows import flat_rows, make_row
from workloads import row_of_nodes

from treepack.costs.model_cost import operations, shape_of
from treepack.costs.presets import PRESETS
from treepack.data.batch import Batch
from treepack.model.forward import prepare_batch, row_loss
from treepack.model.layers import adapt_layers
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel

TURNS = 56
KINDS = ("summary", "answers")


def edited_rollout(kind: str, edits: int, tokens: int, vocabulary: int) -> Batch:
    """The row of a rollout of `tokens` tokens with `edits` edits."""
    prompt, turn, summary = tokens // 8, tokens // 64, tokens // 128
    observed = turn * 5 // 8
    parent, size, trunk = [-1], [prompt], 0
    trained = [np.zeros(prompt, np.int64)]
    for segment, turns in enumerate(np.array_split(np.arange(TURNS), edits + 1)):
        is_edited = segment < edits
        written = summary if is_edited and kind == "summary" else 0
        answers = np.tile(np.arange(turn) >= observed, len(turns)).astype(np.int64)
        parent, size = [*parent, trunk], [*size, len(answers) + written]
        trained += [answers, np.ones(written, np.int64)]
        if is_edited:
            kept = written or int(answers.sum())
            parent, size = [*parent, trunk], [*size, kept]
            trunk = len(size) - 1
            trained.append(np.zeros(kept, np.int64))
    work = row_of_nodes(kind, parent, size)
    ids = np.random.default_rng(0).integers(0, vocabulary, work.tokens)
    ends = np.flatnonzero(work.subtree_end == np.arange(1, work.tokens + 1))
    return make_row(0, ids, work.subtree_end, ends, np.concatenate(trained))


def step(loaded: LoadedModel, optimiser: torch.optim.Optimizer, rows: list[Batch], *, are_chains: bool) -> float:
    """One optimiser step, whose gradients stay; the mean loss."""
    optimiser.zero_grad(set_to_none=True)
    weight, total = sum(row.total_weight for row in rows), 0.0
    for row in rows:
        placed = as_chains(loaded, row) if are_chains else prepare_batch(loaded, row)
        with torch.autocast(loaded.device.type, torch.bfloat16, enabled=loaded.device.type == "cuda"):
            loss = row_loss(loaded, placed) / weight
        torch.autograd.backward(loss)
        total += float(loss.detach())
    optimiser.step()
    return total


def gradients(loaded: LoadedModel) -> list[Tensor]:
    """A copy of all gradients."""
    return [each.grad.clone() for each in loaded.model.parameters() if each.grad is not None]


def norm(tensors: list[Tensor]) -> float:
    """The norm of all entries together."""
    return float(torch.stack([each.double().norm() for each in tensors]).norm())


def measure(loaded: LoadedModel, row: Batch, repeats: int) -> tuple[dict[str, float], float, float]:
    """Median seconds of each way, and the differences of losses and gradients."""
    optimiser = torch.optim.AdamW(loaded.model.parameters(), lr=0.0, fused=loaded.device.type == "cuda")
    is_gpu = loaded.device.type == "cuda"
    ways = {"row": ([row], False), "branches": (flat_rows([row], 0), is_gpu)}
    times: dict[str, list[float]] = {way: [] for way in ways}
    losses: dict[str, float] = {}
    slopes: list[Tensor] = []
    for turn in range(repeats + 1):
        for way, (rows, are_chains) in ways.items():

            def run(way: str = way, rows: list[Batch] = rows, *, are_chains: bool = are_chains) -> None:
                losses[way] = step(loaded, optimiser, rows, are_chains=are_chains)

            seconds = seconds_of(loaded.device, run)
            if turn:  # the first turn compiles
                times[way].append(seconds)
            elif way == "row":
                slopes = gradients(loaded)
            else:
                others = gradients(loaded)
                apart = norm([a.sub_(b) for a, b in zip(slopes, others, strict=True)]) / norm(others)
                slopes.clear()
    difference = abs(losses["row"] / losses["branches"] - 1)
    if difference > 1e-3:
        raise SystemExit(f"the row's loss is {losses['row']}, that of the branches {losses['branches']}")
    return {way: statistics.median(each) for way, each in times.items()}, difference, apart


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-1.7b", help=f"{', '.join(PRESETS)}, or a Qwen3-like config.json")
    parser.add_argument("--edits", default="2,5,10", help="comma separated")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Measure every rollout and print the table."""
    arguments = parse()
    is_dry = arguments.dry_run
    device, name = torch.device("cpu" if is_dry else "cuda"), "tiny" if is_dry else arguments.model
    config = DRY_RUN_MODEL if is_dry else PRESETS.get(name) or json.loads(Path(name).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "config.json"
        source.write_text(json.dumps({**config, **POSITIONS}))
        dtype, autocast = (torch.float64, None) if is_dry else (torch.float32, torch.bfloat16)
        loaded = load_model(source, attention="auto", dtype=dtype, autocast=autocast, device=device)
    adapt_layers(loaded.model, checkpointing=True, compiled=not is_dry)
    loaded.model.train()
    shape, tokens = shape_of(config, name=name), 1024 if is_dry else 65_536
    with flash_attention_4() as fa4:
        print(f"{name}, {device_name(dry=is_dry)}, commit {commit()}, rollouts of {tokens:,} tokens, branches through "
              f"{'FlashAttention-4' if fa4 else 'FlashAttention of torch'}")  # fmt: skip
        print("| stays | edits | tokens, branches / row | operations | branches, s | row, s | speed-up | loss | grad |")
        print("|---" * 9 + "|")
        for kind in KINDS:
            for edits in map(int, arguments.edits.split(",")):
                row = edited_rollout(kind, edits, tokens, config["vocab_size"])
                seconds, difference, apart = measure(loaded, row, arguments.repeats)
                ideal = operations(shape, work_of(flat_rows([row], 0))) / operations(shape, work_of([row]))
                cells = [
                    *(kind, edits, f"{row.tokens_flat:,} / {row.num_tokens:,}", f"{ideal:.2f}x"),
                    *(f"{seconds['branches']:.2f}", f"{seconds['row']:.2f}"),
                    *(f"{seconds['branches'] / seconds['row']:.2f}x", f"{difference:.0e}", f"{apart:.0e}"),
                ]
                print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
