"""Experts over ranks against FSDP2 alone, on several GPUs of one machine: losses, seconds, memory.

    torchrun --nproc-per-node 4 benchmarks/expert_ranks.py [--layers N] [--tokens 16384] [--repeats 3] [--share 0.6]
    torchrun --nproc-per-node 2 benchmarks/expert_ranks.py --dry-run       tiny sizes on the CPU

The model has the shape of Qwen3-30B-A3B with random weights and as many layers as `--share` of the memory holds, by 16
bytes for a weight (float32 weights, gradients, AdamW). Every rank has a tree of its own: a prompt and 8 answers,
`--tokens` in total. Layers are recomputed, products are bfloat16. Both ways start with equal weights and run equal
rows, so their losses must agree to 1 % before anything is timed. Seconds are the median over steps of the slowest
rank, and gigabytes the peak of the largest. Rank 0 prints the table.

    FSDP2                each rank gathers all experts of a layer, forward, again for recomputation, and backward
    experts on R ranks   tokens travel to the ranks of their experts; other weights as before
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
import zlib
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from experts import TINY, make_row
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from transformers import AutoConfig
from workloads import star

from treepack.attention import row_multiple
from treepack.costs.model_cost import PRESETS
from treepack.data.batch import Batch
from treepack.model.forward import WholeRows
from treepack.model.layers import adapt_layers
from treepack.model.load import build_empty, read_config, with_attention
from treepack.model.loaded import LoadedModel
from treepack.model.weights.reading import own_part
from treepack.objectives.row_numbers import LossPart
from treepack.train.options import TrainOptions
from treepack.train.sharding import _shard

BYTES_PER_WEIGHT = 16


def preset(layers: int, *, tiny: bool) -> dict[str, Any]:
    """Return the fields of the configuration."""
    fields = PRESETS["qwen3-30b-a3b"] if not tiny else {**PRESETS["qwen3-30b-a3b"], **TINY}
    return {**fields, "num_hidden_layers": layers}


def fitting_layers(fields: dict[str, Any], memory: float) -> int:
    """Return the number of layers whose weights take at most `memory` bytes over all ranks, besides the embeddings."""
    hidden, experts, width = (fields[name] for name in ("hidden_size", "num_experts", "moe_intermediate_size"))
    heads = fields["num_attention_heads"] + fields["num_key_value_heads"]
    layer = 3 * experts * width * hidden + 2 * heads * fields["head_dim"] * hidden
    ends = 2 * fields["vocab_size"] * hidden
    return max(1, min(48, int((memory / BYTES_PER_WEIGHT - ends) / layer)))


def load(fields: dict[str, Any], expert_ranks: int, device: torch.device) -> LoadedModel:
    """Return a sharded model whose weights depend on their names only; no rank ever has all of them."""
    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model(**fields).save_pretrained(folder)
        config, _ = read_config(folder)
        causal = build_empty(folder, config, torch.float32)
    root = _shard(causal, causal, TrainOptions(expert_ranks=expert_ranks), device)
    causal.to_empty(device=device)
    causal.tie_weights()
    for name, parameter in causal.named_parameters():
        draw(name, parameter, device)
        parameter._is_hf_initialized = True
    causal.initialize_weights()  # buffers only
    loaded = LoadedModel(causal.eval(), "random", "reference", (), device=device, root=root)
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    loaded = with_attention(loaded, "auto", half)
    adapt_layers(loaded.causal, checkpointing=True, compiled=False)
    root.reshard()
    loaded.model.train()
    return loaded


@torch.no_grad()
def draw(name: str, parameter: Tensor, device: torch.device) -> None:
    """Fill this rank's part of a parameter: norms with 1, others with normal numbers by the seed of the name."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if parameter.ndim == 1:
        local.fill_(1.0)
        return
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    whole = torch.empty(parameter.shape, device=device).normal_(0.0, 0.02, generator=generator)
    local.copy_(whole[tuple(slice(first, stop) for first, stop in own_part(parameter))])


class Measured:
    """A way to train: the losses of the first steps, seconds of forward and backward, of AdamW, and bytes."""

    def __init__(self, loaded: LoadedModel, row: Batch, repeats: int) -> None:
        """Run one step to warm up, and `repeats` more."""
        device = loaded.device
        self.losses: list[float] = []
        half = partial(torch.autocast, device.type, torch.bfloat16) if device.type == "cuda" else nullcontext
        runner = WholeRows(loaded, autocast=half)
        total = over_ranks(row.total_weight, device, distributed.ReduceOp.SUM)
        optimiser = torch.optim.AdamW(loaded.model.parameters(), lr=1e-5, fused=True)
        times: list[tuple[float, float]] = []
        for number in range(repeats + 1):
            if number == 1 and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            start = clock(device)
            loss = float(runner.backward(row, LossPart(denominator=total)).loss)
            middle = clock(device)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            times.append((middle - start, clock(device) - middle))
            self.losses.append(over_ranks(loss, device, distributed.ReduceOp.SUM))
        slowest = [[over_ranks(each[part], device, distributed.ReduceOp.MAX) for each in times[1:]] for part in (0, 1)]
        self.seconds, self.update = map(statistics.median, slowest)
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        self.peak = over_ranks(peak, device, distributed.ReduceOp.MAX)


def clock(device: torch.device) -> float:
    """Return the time after the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def over_ranks(number: float, device: torch.device, operation: Any) -> float:
    """Return the sum or maximum of a number over the ranks."""
    value = torch.tensor(float(number), dtype=torch.float64, device=device)
    distributed.all_reduce(value, operation)
    return float(value)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Experts over ranks against FSDP2 alone.")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.dry_run else f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group("gloo" if arguments.dry_run else "cpu:gloo,cuda:nccl")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    fields = preset(2, tiny=arguments.dry_run)
    if device.type == "cuda":
        memory = arguments.share * size * torch.cuda.get_device_properties(device).total_memory
        fields = preset(arguments.layers or fitting_layers(fields, memory), tiny=False)
        arguments.tokens = arguments.tokens // 128 * 128
    else:
        arguments.tokens, arguments.repeats = 128, 1
    # A prompt of half the row, and 8 answers; longer by the rank, so that ranks send different numbers of tokens.
    answer = arguments.tokens // 16 - 8 * rank
    workload = star("rows", arguments.tokens // 2, 8, answer if answer > 0 else 8)
    if rank == 0:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        print(f"{size} x {name}; {fields['num_hidden_layers']} layers; rows of {workload.tokens:,} tokens per rank")
        print(f"{'way':<22}{'loss':>9}{'fwd+bwd s':>11}{'AdamW s':>9}{'tokens/s':>10}{'peak GB':>9}", flush=True)
    results: list[Measured] = []
    for expert_ranks in (1, size):
        started = time.perf_counter()
        loaded = load(fields, expert_ranks, device)
        row = make_row(workload, fields["vocab_size"], row_multiple(loaded.attention)).to(device)
        each = Measured(loaded, row, arguments.repeats)
        results.append(each)
        if rank == 0:
            way = "FSDP2" if expert_ranks == 1 else f"experts on {expert_ranks} ranks"
            rate = size * workload.tokens / each.seconds
            print(
                f"{way:<22}{each.losses[0]:>9.4f}{each.seconds:>11.3f}{each.update:>9.3f}{rate:>10,.0f}"
                f"{each.peak / 1e9:>9.1f}   ({time.perf_counter() - started:.0f} s in total)",
                flush=True,
            )
        del loaded, row
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            if rank == 0 and torch.cuda.memory_allocated() > 1e9:
                print(f"{torch.cuda.memory_allocated() / 1e9:.1f} GB are not freed", flush=True)
    first, second = results
    for a, b in zip(first.losses, second.losses, strict=True):
        assert abs(a - b) <= 0.01 * abs(a), f"losses differ: {first.losses} and {second.losses}"
    if rank == 0:
        time_ratio, memory_ratio = second.seconds / first.seconds, second.peak / max(first.peak, 1)
        print(f"losses agree: {[f'{loss:.4f}' for loss in second.losses]}")
        print(f"of FSDP2 alone: time {time_ratio:.2f}, memory {memory_ratio:.2f}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
