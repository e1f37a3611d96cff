"""Whole steps at the shapes of published figures: a tree, flat and append-only sequences, in one run on one GPU.

    python benchmarks/peer_shapes.py --json RUN.jsonl [--shapes castform-64,tau-bench] [--parts steps,attention]
        [--repeats 2] [--layers N] [--seconds 15] [--budget 540] [--flat own|fa4|fa2] [--compile]
    python benchmarks/peer_shapes.py --table RUN.jsonl      the tables of finished runs
    python benchmarks/peer_shapes.py --dry-run              tiny models and trees on the CPU

`peer_trees.py` has the shapes, the claims of their authors and the three kinds of rows. All ways run the same random
model: float32 weights under bfloat16 autocast, layers recomputed, AdamW, rows of at most as many tokens as the tree.
The first step of each way is a check: losses and gradients must agree. The others are timed in turns, with medians.

    layers     the maximum for which all steps of a shape take `--seconds`, by operations, and which fit the memory
    ends       steps without any layer: embedding, output layer, loss and their update. Layers are equal, so
               whole = ends + (seconds - ends) * layers of the whole model / layers that ran
    ideal      operations of the baseline over operations of the tree (costs.model_cost), of layers that ran, and of all
    claimed    the speed-up over flat sequences that the authors report for a shape like this, on their machines

Sequences attend through this package's kernels (`--flat own`), or through varlen FlashAttention 4 or 2. Recurrent
layers and experts are this package's in all ways. `--parts attention` times attention alone by benchmarks/attention.py,
whose implementations are `--impls`. Each finished figure is a line of RUN.jsonl; progress goes to stderr. A shape that
would not end within --budget seconds is skipped. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from candidates import Heads
from experts import TINY as TINY_EXPERTS
from flat_sequences import flash_attention_4
from hybrid_step import LARGEST_DIFFERENCE, Way, gradients_of, load, make_step, rms_difference
from hybrid_step import TINY as TINY_HYBRID
from measure import commit, device_name, product_rate, seconds_of
from peer_trees import SHAPES, TINY_SHAPES, PeerShape, TurnTree, append_rows, flat_rows, tree_rows
from torch import nn
from training_rows import count_work

import attention
from treepack.costs.model_cost import PRESETS, operations, shape_of
from treepack.data.batch import Batch
from treepack.model.experts.weights import cast_once
from treepack.model.forward import prepare_batch, row_loss
from treepack.model.layers import find_decoder
from treepack.model.loaded import LoadedModel

TINY = TINY_HYBRID | TINY_EXPERTS | {"vocab_size": 300, "num_hidden_layers": 2, "full_attention_interval": 2}
BYTES_PER_WEIGHT = 20  # weight, gradient, two states of AdamW, and the gradients that the check keeps
HEAD_BYTES = 14 << 30  # logits of a chunk and their gradients
EFFICIENCY = 0.4  # of a step, of the rate of products, for estimates of its time
STARTING = 25.0  # seconds to load a model and to compile its kernels, counted in the budget


class Session:
    """The options, the device with its rate and memory, the clock of the budget, and the records so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Start the clock."""
        self.options, self.began = options, time.perf_counter()
        self.device = torch.device("cpu" if options.dry_run else "cuda")
        self.rate = product_rate(self.device)
        gpu = self.device.type == "cuda"
        self.memory = 0.9 * torch.cuda.get_device_properties(0).total_memory - HEAD_BYTES if gpu else 0.0
        self.records: list[dict[str, Any]] = []
        self.about = {
            "command": " ".join(sys.argv), "commit": commit(), "device": device_name(dry=options.dry_run),
            "torch": torch.__version__, "product_tflops": round(self.rate / 1e12, 1),
        }  # fmt: skip

    def say(self, text: str) -> None:
        """Print progress with the seconds since the start."""
        print(f"{time.perf_counter() - self.began:6.1f} s  {text}", file=sys.stderr, flush=True)

    def allows(self, name: str, seconds: float) -> bool:
        """Return True if the budget has room for `seconds`; else print a note."""
        left: float = self.options.budget - (time.perf_counter() - self.began)
        if seconds > left:
            self.say(f"{name}: skipped, because about {seconds:.0f} s are needed and {left:.0f} s are left")
        return seconds <= left

    def add(self, record: dict[str, Any]) -> None:
        """Keep a record, and append it to the file at once."""
        self.records.append(record)
        if self.options.json:
            with self.options.json.open("a", encoding="utf-8") as file:
                print(json.dumps(record | self.about), file=file, flush=True)


def config_of(shape: PeerShape, session: Session) -> dict[str, Any]:
    """Return the configuration of the whole model, or of a tiny one in a dry run."""
    config = {**PRESETS[shape.model], "max_position_embeddings": 1 << 20}
    return config | {key: value for key, value in TINY.items() if key in config} if session.options.dry_run else config


def choose_layers(config: dict[str, Any], rows: dict[str, list[Batch]], session: Session) -> int:
    """Return the maximum of layers that the options, the time and the memory allow; at least one period of kinds."""
    period, options = config.get("full_attention_interval", 1), session.options
    if options.layers or options.dry_run:
        return int(options.layers or config["num_hidden_layers"])
    weights = [num_weights(config | {"num_hidden_layers": count * period}) for count in (1, 2)]
    layers = period
    while layers + period <= config["num_hidden_layers"]:
        deeper = config | {"num_hidden_layers": layers + period}
        held = weights[0] + (weights[1] - weights[0]) * layers / period
        if step_seconds(deeper, rows, session) > options.seconds:
            break
        if BYTES_PER_WEIGHT * held + activation_bytes(deeper, rows["tree"][0]) > session.memory:
            break
        layers += period
    return int(layers)


def step_seconds(config: dict[str, Any], rows: dict[str, list[Batch]], session: Session) -> float:
    """Return an estimate of the seconds of all steps, of the check and the repeats, layers recomputed."""
    shape = shape_of(config, name="")
    work = sum(operations(shape, count_work(each)) for each in rows.values())
    steps: int = session.options.repeats + 1
    return steps * work * 4 / 3 / (EFFICIENCY * session.rate)


def activation_bytes(config: dict[str, Any], row: Batch) -> float:
    """Return an estimate of the bytes of a step besides the weights: inputs of layers, and one layer that runs."""
    hidden, heads = config["hidden_size"], heads_of(config)
    chosen = config.get("num_experts_per_tok", 0)
    inner = chosen * (config["moe_intermediate_size"] + hidden) if chosen else config["intermediate_size"]
    recurrent = 3 * config.get("linear_num_value_heads", 0) * config.get("linear_value_head_dim", 0)
    # Measured 250 KB a token for widths of 4,096 and 12,288 without the compiler.
    working = 16 * (hidden + inner + recurrent)
    kept = config["num_hidden_layers"] * (4 * hidden + 2 * heads.query * heads.size)
    return row.num_tokens * float(working + kept)


def heads_of(config: dict[str, Any]) -> Heads:
    """Return the heads of the layers with attention."""
    size = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return Heads(config["num_attention_heads"], config["num_key_value_heads"], size, size)


def num_weights(config: dict[str, Any]) -> int:
    """Return the number of weights of a model, without making them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return sum(parameter.numel() for parameter in causal.parameters())


@contextmanager
def without_layers(loaded: LoadedModel) -> Iterator[None]:
    """Let the model consist of its embedding, last norm and output layer inside the block."""
    decoder = find_decoder(loaded.causal)
    layers, decoder.layers = decoder.layers, nn.ModuleList()
    try:
        yield
    finally:
        decoder.layers = layers


def rows_of(tree: TurnTree, vocabulary: int) -> dict[str, list[Batch]]:
    """Return the rows of every way; append-only only if it differs from flat."""
    rows = {"tree": tree_rows(tree, vocabulary)}
    rows["flat"] = flat_rows(tree, rows["tree"][0])
    if tree.samples != tree.leaves:
        rows["append-only"] = append_rows(tree, rows["tree"][0])
    return rows


def measure_steps(name: str, shape: PeerShape, session: Session) -> None:
    """Check and time the steps of a shape, and record them.

    Raises:
        ValueError: losses or gradients of the ways differ.
    """
    options, whole = session.options, config_of(shape, session)
    rows = rows_of(shape.tree(), whole["vocab_size"])
    layers = choose_layers(whole, rows, session)
    config = whole | {"num_hidden_layers": layers}
    if not session.allows(name, STARTING + step_seconds(config, rows, session)):
        return
    loaded = load(config, argparse.Namespace(no_compile=not options.compile, dry_run=options.dry_run), session.device)
    loaded = replace(loaded, varlen=loaded.varlen and options.flat != "own")
    session.say(f"{name}: {shape.model}, {layers} layers, {loaded.attention} attention")
    ways = {
        way: Way(each, lambda row: row_loss(loaded, prepare_batch(loaded, row)), cast_once)
        for way, each in rows.items()
    }
    optimiser = torch.optim.AdamW(loaded.model.parameters(), lr=0.0, fused=session.device.type == "cuda")
    losses, difference = check(name, loaded, optimiser, ways, session)
    times, ends, gib = time_ways(loaded, optimiser, ways, session)
    counted = {way: [operations(shape_of(each, name=""), count_work(rows[way])) for each in (config, whole)]
               for way in ways}  # fmt: skip
    for way in ways:
        session.add({
            "part": "steps", "shape": name, "model": shape.model, "way": way, "layers": layers,
            "all_layers": whole["num_hidden_layers"], "tokens": sum(row.num_tokens for row in rows[way]),
            "rows": len(rows[way]), "loss": losses[way], "gradients_differ": difference[way],
            "seconds": times[way], "ends": ends[way], "gib": gib[way],
            "operations": counted[way][0], "all_operations": counted[way][1],
            "attention": loaded.attention, "flat": options.flat, "compiled": options.compile,
            "claimed": shape.claimed, "source": shape.source,
        })  # fmt: skip
        session.say(f"{name}: {way} {times[way]:.3f} s, without layers {ends[way]:.3f} s, {gib[way]:.1f} GiB")


def check(
    name: str, loaded: LoadedModel, optimiser: torch.optim.Optimizer, ways: dict[str, Way], session: Session
) -> tuple[dict[str, float], dict[str, float]]:
    """Run a step of each way; return its loss, and the RMS difference of its gradients to the tree's gradients.

    In a dry run without autocast, so that a wrong row is distinguished from rounding.

    Raises:
        ValueError: they differ.
    """
    losses, differences = dict[str, float](), dict[str, float]()
    gradients = None
    for way, each in ways.items():
        losses[way] = make_step(loaded, optimiser, each, autocast=not session.options.dry_run)
        gradients = gradients_of(loaded) if gradients is None else gradients
        differences[way] = rms_difference(loaded, gradients)
        session.say(f"{name}: {way} has loss {losses[way]:.5f}, its gradients differ by {differences[way]:.1e}")
        bound = LARGEST_DIFFERENCE[session.device.type]
        if abs(losses[way] / losses["tree"] - 1) > 1e-3 or not differences[way] <= bound:
            raise ValueError(f"{way} rows differ from the tree by more than 0.001 in the loss or {bound} in gradients")
    return losses, differences


def time_ways(
    loaded: LoadedModel, optimiser: torch.optim.Optimizer, ways: dict[str, Way], session: Session
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Return the seconds of a step of each way, those without any layer, and the peak memory in GiB."""
    gpu, seconds, gib = session.device.type == "cuda", dict[tuple[str, bool], list[float]](), dict[str, float]()
    for turn in range(session.options.repeats):
        for way, each in ways.items():
            for with_layers in (True, False):
                if gpu and with_layers:
                    torch.cuda.reset_peak_memory_stats()
                with nullcontext() if with_layers else without_layers(loaded):
                    if turn == 0 and not with_layers:  # its kernels have other sizes
                        make_step(loaded, optimiser, each)
                    spent = seconds_of(session.device, lambda each=each: make_step(loaded, optimiser, each))  # type: ignore[misc]
                seconds.setdefault((way, with_layers), []).append(spent)
                if with_layers:
                    gib[way] = torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0
    whole, ends = ({way: statistics.median(seconds[way, part]) for way in ways} for part in (True, False))
    return whole, ends, gib


def measure_attention(name: str, shape: PeerShape, session: Session) -> None:
    """Time attention alone on the tree of a shape, and on its samples one by one."""
    options, config = session.options, config_of(shape, session)
    if not session.allows(f"{name}, attention", 8.0 * len(options.impls)):
        return
    attention.SHAPES[name] = heads_of(config)
    choices = argparse.Namespace(
        dtype="bfloat16", layout="bhtd", repeats=2 * options.repeats + 1, dry_run=options.dry_run
    )
    work = replace(shape.tree().workload, name=name)
    for record in attention.measure(work, name, options.impls, choices):
        session.add({"part": "attention", **record, "model": shape.model})
        both = record.get("both_ms")
        session.say(f"{name}: {record['implementation']} {f'{both:.2f} ms' if both else record.get('error')}")


def tables(records: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of both tables."""
    steps = {(each["shape"], each["way"]): each for each in records if each["part"] == "steps"}
    yield "| shape | model, layers | baseline | tokens tree / baseline | baseline, s | tree, s | speed-up | ideal " + (
        "| of ideal | whole model: speed-up | ideal | GiB tree / baseline | claimed |\n" + "|---" * 13 + "|"
    )
    for (shape, way), base in steps.items():
        if way != "tree" and (shape, "tree") in steps:
            yield step_line(steps[shape, "tree"], base)
    attended = [each for each in records if each["part"] == "attention"]
    names = list(dict.fromkeys(each["implementation"] for each in attended))
    if attended:
        yield f"\n| attention, ms forward and backward | tokens tree / flat | {' | '.join(names)} |"
        yield "|---" * (len(names) + 2) + "|"
    for shape in dict.fromkeys(each["workload"] for each in attended):
        mine = {each["implementation"]: each for each in attended if each["workload"] == shape}
        cells = [f"{mine[name]['both_ms']:.2f}" if "both_ms" in mine.get(name, {}) else "-" for name in names]
        one = next(iter(mine.values()))
        yield f"| {shape} | {one['tokens']:,} / {one['tokens_flat']:,} | {' | '.join(cells)} |"


def step_line(tree: dict[str, Any], base: dict[str, Any]) -> str:
    """Return one line of the table of steps."""
    speedup, ideal = base["seconds"] / tree["seconds"], base["operations"] / tree["operations"]
    whole = [whole_seconds(each) for each in (tree, base)]
    cells = [
        tree["shape"],
        f"{tree['model']}, {tree['layers']} of {tree['all_layers']}",
        base["way"],
        f"{tree['tokens']:,} / {base['tokens']:,}",
        f"{base['seconds']:.3f}",
        f"{tree['seconds']:.3f}",
        f"{speedup:.2f}",
        f"{ideal:.2f}",
        f"{speedup / ideal:.2f}",
        f"{whole[1] / whole[0]:.2f}",
        f"{base['all_operations'] / tree['all_operations']:.2f}",
        f"{tree['gib']:.1f} / {base['gib']:.1f}",
        f"{tree['claimed']} ({tree['source']})" if base["way"] == "flat" else "",
    ]
    return f"| {' | '.join(cells)} |"


def whole_seconds(record: dict[str, Any]) -> float:
    """Return the seconds of a step of the whole model: its ends, and all of its layers."""
    layers: float = (record["seconds"] - record["ends"]) * record["all_layers"] / record["layers"]
    return float(record["ends"]) + layers


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", help=f"comma separated, default all: {', '.join(SHAPES)}")
    parser.add_argument("--parts", default="steps,attention")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--layers", type=int, help="layers of every model")
    parser.add_argument("--seconds", type=float, default=15, help="of all steps of a shape, which the layers follow")
    parser.add_argument("--budget", type=float, default=540, help="seconds after which no shape starts")
    parser.add_argument("--flat", default="own", choices=("own", "fa4", "fa2"), help="attention of sequences")
    parser.add_argument("--impls", default="flex,triton,flash,flat-fa2,flat-fa4", help="of attention alone")
    parser.add_argument("--compile", action="store_true", help="compile the layers")
    parser.add_argument("--json", type=Path, help="append each figure to this file")
    parser.add_argument("--table", type=Path, help="print the tables of this file, and measure nothing")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    known = TINY_SHAPES if options.dry_run else SHAPES
    options.shapes = options.shapes.split(",") if options.shapes else list(known)
    options.impls = "flex,reference".split(",") if options.dry_run else options.impls.split(",")
    if unknown := set(options.shapes) - set(known):
        parser.error(f"unknown shapes {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    if options.dry_run:
        options.repeats = 1
    return options


def main(arguments: list[str] | None = None) -> None:
    """Measure the shapes, and print the tables last."""
    options = parse(arguments)
    if options.table:
        lines = options.table.read_text(encoding="utf-8").splitlines()
        print("\n".join(tables([json.loads(line) for line in lines])))
        return
    session = Session(options)
    session.say(" ".join(f"{key}={value}" for key, value in session.about.items()))
    known, failed = TINY_SHAPES if options.dry_run else SHAPES, False
    with flash_attention_4() if options.flat == "fa4" else nullcontext(True) as available:
        if not available:
            raise SystemExit("--flat fa4: flash_attn.cute is not installed; install flash-attn-4, or use --flat own")
        for part in options.parts.split(","):
            for name in options.shapes:
                try:
                    (measure_steps if part == "steps" else measure_attention)(name, known[name], session)
                except (RuntimeError, ValueError) as error:  # the other shapes still run
                    failed |= not isinstance(error, torch.OutOfMemoryError)
                    session.say(f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[0][:300]}")
                gc.collect()
                if session.device.type == "cuda":
                    torch.cuda.empty_cache()
    print("\n".join(tables(session.records)))
    sys.exit(failed)


if __name__ == "__main__":
    main()
