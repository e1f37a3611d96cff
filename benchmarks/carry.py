"""Training steps on one GPU: rows in pieces against rows of a capacity, the same trees on every side, by turns.

    python benchmarks/carry.py SOURCE ... [--ways recomputed:65536,offload:262144,auto:65536,carry:auto]
        [--model qwen3-1.7b] [--layers N] [--optimizer adamw|sgd] [--repeats N] [--gpu-gb N] [--host-gb N]
    python benchmarks/carry.py --dry-run      a tiny model and tree on the CPU

A source is a workload of `carried_rows.py`, or a file that `training_rows.py` wrote from rows of whole trees. A way is
one of these, with the tokens of its rows, or of its pieces:

    recomputed    every layer is recomputed in the backward pass (--gradient-checkpointing)
    offload       and its input and attention output wait in host memory (--offload-checkpoints)
    auto          as few layers are recomputed as memory demands (--checkpoint-layers auto)
    carry         whole trees in pieces of so many tokens; auto chooses them by memory (--carry)

Each turn times one optimiser step of each way, with learning rate 0. All losses must agree, or the run fails. `gain` is
the median over turns of the seconds of the first way over those of this way. GiB are the peak of torch's allocator, and
host memory that is pinned. `forward` and `backward` count tokens that run through the layers, without recomputation.
--gpu-gb and --host-gb limit the memory as if the machine had no more. Needs torch, triton, numpy and transformers.

    carry.py forks-32k                                          random forks, 64 sequences of 32k
    carry.py tau.npz                                            rows of tau-bench by turns, from training_rows.py
    carry.py forks-128k --layers 4 --ways recomputed:131072,carry:auto                       a deep search
    carry.py wide-256k wide-1m --layers 2 --ways carry:8192 --repeats 1                      peaks of two trees
    carry.py long-200k --ways carry:auto --gpu-gb 80 --host-gb 100 --repeats 1               one long sample
    carry.py long-350k --ways carry:auto --gpu-gb 80 --host-gb 100 --repeats 1               a longer one
    carry.py forks-32k --model qwen3-8b --optimizer sgd --ways recomputed:32768,offload:65536,carry:auto
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from carried_rows import WORKLOADS, cut_rows, whole_rows
from experts import seconds_of

from treepack.analysis.model_cost import PRESETS
from treepack.carry.backward import CarryOptions, backward_row
from treepack.carry.limit import USABLE, CarryCosts, CarryPlan, choose_limit, measure_costs
from treepack.carry.offload import CarryBudget, CarryMemory
from treepack.data.batch import Batch
from treepack.files.memory import available_memory
from treepack.model.forward import prepare_batch, row_loss
from treepack.model.layer_memory import fewest_recomputed, head_bytes, host_pages, measure_layers, update_bytes
from treepack.model.layers import adapt_layers, adapted_layers
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel
from treepack.model.loss import CHUNK
from treepack.model.memory import is_memory_error
from treepack.model.offload import Offload

TINY: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
POSITIONS = {"max_position_embeddings": 1 << 20}
WAYS = "recomputed:65536,offload:262144,auto:65536,carry:auto"
STATE_BYTES = {"adamw": 8, "sgd": 0}
# bfloat16 rounds a logit by 0.4 %, and a loss is a mean over many.
LARGEST_DIFFERENCE = 1e-3
# Of the dry run, which measures nothing.
CPU_COSTS = CarryCosts(num_layers=3, fixed=0, piece=1, keys_values=1, sums=1, output=1)


@dataclass
class Way:
    """A way to train the trees of a source, and its measurements; `obstacle` is the reason why it cannot run."""

    name: str
    rows: list[Batch]
    recomputed: int
    offload: Offload | None = None
    carry: CarryOptions | None = None
    note: str = ""
    obstacle: str | None = None
    loss: float = 0.0
    tokens: tuple[int, int] = (0, 0)
    peak: float = 0.0
    seconds: list[float] = field(default_factory=list)

    @property
    def host(self) -> int:
        """Bytes of pinned host memory."""
        if self.offload is not None:
            return self.offload.pages.num_bytes
        return 0 if self.carry is None or self.carry.memory is None else self.carry.memory.num_bytes


@dataclass(frozen=True)
class Bench:
    """The model, and the memory that may be used."""

    loaded: LoadedModel
    optimiser: torch.optim.Optimizer
    options: argparse.Namespace

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.loaded.device

    def free_bytes(self) -> int:
        """Return what gradients, the optimiser's states and activations may still take on the GPU."""
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(self.device)[0]
        if self.options.gpu_gb is not None:
            free = min(free, int(self.options.gpu_gb * 1e9) - torch.cuda.memory_reserved(self.device))
        state = 0 if self.optimiser.state else STATE_BYTES[self.options.optimizer]
        return int(USABLE * free) - update_bytes(self.loaded.model, state_bytes=state)

    def host_bytes(self) -> int:
        """Return what may be pinned."""
        if self.options.host_gb is not None:
            return int(self.options.host_gb * 1e9)
        return int(USABLE * available_memory())


def make_way(bench: Bench, text: str, rows: list[Batch]) -> Way:
    """Return the way that `text` names, such as carry:8192."""
    kind, _, size = text.partition(":")
    layers = num_layers(bench.loaded)
    if kind == "carry":
        plan = plan_pieces(bench, rows, None if size == "auto" else int(size))
        autocast = partial(torch.autocast, bench.device.type, torch.bfloat16)
        memory = CarryMemory(bench.device, plan.budget)
        carry = CarryOptions(plan.limit, memory=memory, autocast=autocast)
        outputs = "kept" if plan.keep_outputs else "computed again"
        note = f"{plan.resident_layers} of {layers} layers on the GPU, outputs of trunk {outputs}"
        return Way(f"carry:{plan.limit}", rows, 0, carry=carry, note=note)
    cut = cut_rows(rows, int(size))
    if kind == "offload":
        return Way(text, cut, layers, offload=Offload(bench.device))
    if kind == "recomputed":
        return Way(text, cut, layers)
    assert kind == "auto", f"ways are recomputed, offload, auto and carry, not {kind}"
    count = count_recomputed(bench, cut)
    return Way(text, cut, count, note=f"{count} of {layers} layers recomputed")


def plan_pieces(bench: Bench, rows: list[Batch], limit: int | None) -> CarryPlan:
    """Return the plan for rows in pieces; on the CPU, with everything in memory."""
    longest = max(row.num_tokens for row in rows)
    path = max(int(row.position_ids.max()) + 1 for row in rows)
    if bench.device.type != "cuda":
        plan = choose_limit(longest, path, CPU_COSTS, gpu_bytes=1 << 40, host_bytes=0, limit=limit)
        # Nothing stays, so that a dry run copies.
        return CarryPlan(plan.limit, 0, True, CarryBudget(stack=0, outputs=0, host_outputs=None), plan.peak)
    set_layers(bench.loaded, 0, None)
    autocast = partial(torch.autocast, bench.device.type, torch.bfloat16)
    costs = measure_costs(bench.loaded, rows[0], CarryOptions(1, autocast=autocast))
    room = {"gpu_bytes": bench.free_bytes(), "host_bytes": bench.host_bytes()}
    print(f"# {costs}, {room}", flush=True)
    return choose_limit(longest, path, costs, **room, limit=limit)


def count_recomputed(bench: Bench, rows: list[Batch]) -> int:
    """Return how many layers must be recomputed for the longest of `rows`."""
    loaded, longest = bench.loaded, max(row.num_tokens for row in rows)
    if bench.device.type != "cuda":
        return num_layers(loaded) // 2
    layer = measure_layers(loaded, rows[0], lower=True)
    room = bench.free_bytes() - head_bytes(loaded.causal, chunk=CHUNK, num_tokens=longest)
    return fewest_recomputed(layer, num_layers(loaded), longest, room)


def num_layers(loaded: LoadedModel) -> int:
    """Return the number of layers."""
    adapted = adapted_layers(loaded.causal)
    assert adapted is not None
    return len(adapted.modules)


def set_layers(loaded: LoadedModel, recomputed: int, offload: Offload | None) -> None:
    """Recompute the first layers from now on, with their inputs in host memory or not."""
    adapted = adapted_layers(loaded.causal)
    assert adapted is not None
    adapted.recomputed, adapted.offload = recomputed, offload


def step(bench: Bench, way: Way) -> None:
    """Run one optimiser step; write loss and tokens to the way."""
    loaded, device = bench.loaded, bench.device
    set_layers(loaded, way.recomputed, way.offload)
    bench.optimiser.zero_grad(set_to_none=True)
    denominator = sum(row.total_weight for row in way.rows)
    total, forward, backward = torch.zeros((), dtype=torch.float64, device=device), 0, 0
    for row in way.rows:
        if way.carry is not None and row.num_tokens > way.carry.limit:
            result = backward_row(loaded, row, way.carry, denominator=denominator)
            total += result.loss
            forward, backward = forward + result.tokens_forward, backward + result.tokens_backward
            continue
        with torch.autocast(device.type, torch.bfloat16):
            loss = row_loss(loaded, prepare_batch(loaded, row)) / denominator
        torch.autograd.backward(loss)
        total += loss.detach()
        forward, backward = forward + row.num_tokens, backward + row.num_tokens
    bench.optimiser.step()
    way.loss, way.tokens = float(total), (forward, backward)


def measure(bench: Bench, ways: list[Way]) -> None:
    """Time all ways by turns; a way that lacks memory gets an obstacle."""
    for _ in range(bench.options.repeats):
        for way in [way for way in ways if way.obstacle is None]:
            if bench.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                way.seconds.append(seconds_of(bench.device, partial(step, bench, way)))
            except RuntimeError as error:
                if not is_memory_error(error):
                    raise
                way.obstacle = "out of memory"
                bench.optimiser.zero_grad(set_to_none=True)
            if bench.device.type == "cuda":
                way.peak = torch.cuda.max_memory_allocated() / 2**30
            print(f"# {way.name}: {way.obstacle or f'{way.seconds[-1]:.2f} s'}", flush=True)


def table(source: str, ways: list[Way], rows: list[Batch]) -> list[str]:
    """Return the lines of a source.

    Raises:
        SystemExit: losses of two ways differ.
    """
    tokens, first = sum(row.num_tokens for row in rows), ways[0]
    lines = []
    for way in ways:
        if way.obstacle is not None:
            lines.append(f"| {source} | {way.name} | {len(way.rows)} | | | {way.obstacle} | | | {way.peak:.1f} | |")
            continue
        if first.obstacle is None and abs(way.loss / first.loss - 1) > LARGEST_DIFFERENCE:
            raise SystemExit(f"{source}: the loss of {way.name} is {way.loss}, that of {first.name} {first.loss}")
        seconds = statistics.median(way.seconds)
        turns = [one / other for one, other in zip(first.seconds, way.seconds, strict=False)]
        gain = f"{statistics.median(turns):.3f}" if first.obstacle is None else ""
        cells = [
            source,
            way.name,
            str(len(way.rows)),
            f"{way.tokens[0]:,}",
            f"{way.tokens[1]:,}",
            f"{seconds:.2f}",
            f"{tokens / seconds / 1000:.1f}",
            gain,
            f"{way.peak:.1f}",
            f"{way.host / 2**30:.1f}",
            way.note,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def load(options: argparse.Namespace, device: torch.device) -> Bench:
    """Return a random model whose layers are compiled and may be recomputed, with its optimiser."""
    name = options.model
    config = dict(TINY if options.dry_run else PRESETS.get(name) or json.loads(Path(name).read_text(encoding="utf-8")))
    config |= POSITIONS | ({} if options.layers is None else {"num_hidden_layers": options.layers})
    config.pop("layer_types", None)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "config.json"
        source.write_text(json.dumps(config))
        loaded = load_model(source, attention="auto", dtype=torch.float32, autocast=torch.bfloat16, device=device)
    adapt_layers(loaded.model, checkpointing=True, compiled=device.type == "cuda")
    loaded.model.train()
    parameters, fused = loaded.model.parameters(), device.type == "cuda"
    if options.optimizer == "sgd":
        return Bench(loaded, torch.optim.SGD(parameters, lr=0.0, fused=fused), options)
    return Bench(loaded, torch.optim.AdamW(parameters, lr=0.0, fused=fused), options)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", help=f"{', '.join(WORKLOADS)}, or files of training_rows.py")
    parser.add_argument("--ways", default=WAYS, help=f"comma separated; default {WAYS}")
    parser.add_argument("--model", default="qwen3-1.7b", help=f"{', '.join(PRESETS)}, or a config.json")
    parser.add_argument("--layers", type=int, help="number of layers; default those of the model")
    parser.add_argument("--optimizer", default="adamw", choices=list(STATE_BYTES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gpu-gb", type=float, help="GB of GPU memory that the process may take")
    parser.add_argument("--host-gb", type=float, help="GB of host memory that pieces may pin")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    if options.dry_run:
        options.sources, options.repeats, options.model = ["tiny"], 1, "tiny"
        options.ways = "recomputed:50,offload:100,auto:50,carry:20"
    return options


def main(arguments: list[str] | None = None) -> None:
    """Measure every source, and print the table last."""
    options = parse(arguments)
    device = torch.device("cpu" if options.dry_run else "cuda")
    if options.gpu_gb is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.gpu_gb * 1e9 / total))
    bench = load(options, device)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    where = "CPU" if options.dry_run else torch.cuda.get_device_name()
    print(f"{where}, torch {torch.__version__}, commit {commit.stdout.strip()}: {options.model}, "
          f"{num_layers(bench.loaded)} layers, {bench.loaded.attention} attention, {options.optimizer}")  # fmt: skip
    vocabulary = bench.loaded.causal.config.vocab_size
    lines = []
    for source in options.sources:
        rows = whole_rows(source, vocabulary)
        ways = [make_way(bench, each, rows) for each in options.ways.split(",")]
        if device.type == "cuda":
            warm_up(bench, ways)
        measure(bench, ways)
        lines += table(Path(source).stem, ways, rows)
    print("| source | way | rows | forward | backward | s | k tokens/s | gain | GiB | host GiB | |")
    print("|---" * 11 + "|")
    print("\n".join(lines))


def warm_up(bench: Bench, ways: list[Way]) -> None:
    """Compile the layers for every way, on a short tree, and pin the pages of offloaded rows."""
    rows = whole_rows("short", bench.loaded.causal.config.vocab_size)
    # Pieces that push, run and pop, and the same tree as a whole.
    limit = rows[0].num_tokens // 4
    for way in ways:
        if way.offload is not None:  # a run pins its pages once, for all steps
            longest = max(row.num_tokens for row in way.rows)
            way.offload.pages.reserve(host_pages(bench.loaded, longest, recomputed=way.recomputed, lower=True))
        carry = None if way.carry is None else CarryOptions(limit, autocast=way.carry.autocast)
        step(bench, Way(way.name, rows, way.recomputed, way.offload, carry))


if __name__ == "__main__":
    main()
