"""Every command on real rollouts: sharing, packing, tokens per second of each stage, and a model that learns.

    python benchmarks/real_data.py --source NAME=PATH [--source ...] [--tools NAME=FILE ...] [--steps 20]

First a byte-level BPE of 16,384 entries is trained on the text of all sources, so that the tokenizer
fits the text; its chat template is the sample data's. Then, for whole trajectories and for turns:
build-trie, pack at 8192 and 32768 (longer trajectories truncated, and counted), stats --check, and some steps of a tiny
Qwen3 on the CPU. Prints one Markdown row each. Needs the development install.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure import commit

from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.reading import read_parts
from treepack.trajectory import Chat, Trajectory

SAMPLES = Path(__file__).parents[1] / "sample_data"
TREEPACK = Path(sys.executable).parent / "treepack"
VOCABULARY = 16_384
CAPACITIES = (8192, 32768)


def texts(paths: list[str]) -> Iterator[str]:
    """All message texts of the sources."""
    for trajectory in (item for part in read_parts(paths, ReadOptions()) for item in part.trajectories()):
        if isinstance(trajectory, Trajectory) and isinstance(trajectory.content, Chat):
            for message in trajectory.content.messages:
                yield str(message["content"])
                yield from (call["function"]["arguments"] for call in message.get("tool_calls", []))


def train_tokenizer(paths: list[str], out: Path) -> None:
    """A tokenizer directory whose vocabulary fits the text of `paths`."""
    from transformers import AutoTokenizer

    sample = AutoTokenizer.from_pretrained(SAMPLES / "tokenizer")
    sample.train_new_from_iterator(texts(paths), VOCABULARY, show_progress=False).save_pretrained(out)
    if not any("chat_template" in path.name for path in out.iterdir()):
        raise SystemExit("the new tokenizer lost its chat template")


def write_model(tokenizer: Path, out: Path) -> None:
    """Configuration of a Qwen3 small enough to train on rows of 32,768 tokens on a CPU."""
    from transformers import AutoTokenizer

    config = json.loads((SAMPLES / "tiny-qwen3.json").read_text())
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    config |= small | {"num_attention_heads": 1, "num_key_value_heads": 1, "layer_types": ["full_attention"] * 2}
    config |= {"vocab_size": len(AutoTokenizer.from_pretrained(tokenizer)), "max_position_embeddings": 65536}
    out.write_text(json.dumps(config))


def treepack(*arguments: Any) -> tuple[str, float]:
    """Output and seconds of one command."""
    began = time.perf_counter()
    done = subprocess.run([TREEPACK, *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"treepack {' '.join(map(str, arguments))}\n{done.stderr}")
    return done.stdout, time.perf_counter() - began


def measure(name: str, path: str, expand: str, folder: Path, options: argparse.Namespace) -> Iterator[list[str]]:
    """Table rows of one source and expansion, one per capacity."""
    tools = ["--tools", options.tools[name]] if name in options.tools else []
    trie = folder / f"{name}-{expand}"
    paths = ["--per-path"] if expand == "turns" else []
    arguments = ("--tokenizer", folder / "tokenizer", "--expand", expand, *paths, "--workers", os.cpu_count(), *tools)
    _, build = treepack("build-trie", path, *arguments, "--out", trie)
    report = json.loads(treepack("stats", trie, "--json")[0])
    flat = report["tokens_flat"]
    for capacity in CAPACITIES:
        packed = folder / f"{name}-{expand}-{capacity}"
        _, pack = treepack(
            "pack", trie, "--capacity", capacity, "--method", "contiguous", "--too-long", "truncate", "--out", packed
        )
        totals, check = treepack("stats", packed, "--check", "--json")
        rows = json.loads(totals)
        losses = train(packed, folder, options.steps) if options.steps else ["-"] * 2
        yield [
            f"{name}, {expand}",
            f"{report['num_trajectories']:,}",
            f"{flat / 1e6:.2f} M",
            f"{100 * report['por']:.1f} %",
            f"{capacity:,}",
            f"{rows['counts'].get('truncated to the capacity', 0)}",
            f"{rows['tokens_packed'] / rows['tokens_tree']:.3f}",
            f"{100 * rows['err']:.1f} %",
            f"{100 * rows['gap']:.1f} %",
            f"{flat / build / 1e6:.2f} M",
            f"{flat / pack / 1e6:.1f} M",
            f"{flat / check / 1e6:.1f} M",
            " to ".join(losses),
        ]
        shutil.rmtree(packed)


def train(packed: Path, folder: Path, steps: int) -> list[str]:
    """First and last loss of a short run, each the mean over a quarter of the steps."""
    out = folder / "model"
    treepack(
        "train",
        packed,
        "--model",
        folder / "model.json",
        "--steps",
        steps,
        "--rows-per-step",
        1,
        "--lr",
        "5e-3",
        "--out",
        out,
    )
    losses = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(out)
    part = max(1, len(losses) // 4)
    return [f"{sum(losses[:part]) / part:.2f}", f"{sum(losses[-part:]) / part:.2f}"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", action="append", required=True, metavar="NAME=PATH")
    parser.add_argument("--tools", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    options.tools = dict(item.split("=", 1) for item in options.tools)
    sources = dict(item.split("=", 1) for item in options.source)
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, commit {commit()}\n")
    header = ["source", "samples", "N_flat", "POR", "capacity", "truncated", "N_pack/N_tree", "ERR", "gap"]
    header += ["build-trie tokens/s", "pack tokens/s", "check tokens/s", f"loss in {options.steps} steps"]
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_tokenizer(list(sources.values()), folder / "tokenizer")
        write_model(folder / "tokenizer", folder / "model.json")
        for source, path in sources.items():
            for expand in ("trajectory", "turns"):
                for row in measure(source, path, expand, folder, options):
                    print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
