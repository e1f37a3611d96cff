"""Rates of the steps of the data path on made-up rollouts: processor seconds, seconds by the clock, units per second.

    python benchmarks/data_path.py                                    20 minutes, 6 GB of disk
    python benchmarks/data_path.py --tokens 10e6 --worker-tokens 0    2 minutes

    rollouts --build-trie--> trie --pack--> rows --stats --check--> counts          whole commands, in fresh processes
    rows in memory --write--> files --read--> rows;  a conversation --tokenise--> samples          functions

Token rollouts come from made_rollouts.py, 8,192 to 32,768 tokens in groups of 16: "heavy" ones repeat nine in ten,
"little" ones one in ten. Rates are units per processor second, so several workers have the rate of a core. Each
line is the median of `--repeats` runs. The program fails if two workers write other bytes than one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from made_rollouts import FORKS, write_rollouts
from measure import commit

from treepack import PackOptions
from treepack.data.dataset import PackedDataset
from treepack.pack.files import write_packed
from treepack.pack.packing import plan_packing
from treepack.tokenise.tokenization import TokenisationJob, TrajectoryTokeniser, load_tokenizer
from treepack.trajectory import Chat, Skipped, Trajectory
from treepack.trie.store.trie_files import read_trie

ROOT = Path(__file__).parents[1]
CAPACITY = 65_536
ANSWERS = {10: 40, 100: 4, 500: 1}  # answers of a conversation -> conversations


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor seconds of a run and of its children, seconds by the clock, and the number of its units."""

    processor: float
    clock: float
    units: float = 0


def run(*words: object) -> Cost:
    """Run a command of treepack in a fresh process."""
    argv = [sys.executable, "-c", "import treepack_cli; treepack_cli.main()", *map(str, words), "--quiet"]
    start = time.monotonic()
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, status, usage = os.wait4(process.pid, 0)  # includes children that the process has waited for
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        assert process.stderr is not None
        sys.exit(f"failed: {' '.join(argv)}\n{process.stderr.read().decode()}")
    return Cost(usage.ru_utime + usage.ru_stime, time.monotonic() - start)


def timed(function: Callable[[], float]) -> Cost:
    """Call a function of this process, which returns the number of its units."""
    processor, clock = time.process_time(), time.perf_counter()
    units = function()
    return Cost(time.process_time() - processor, time.perf_counter() - clock, units)


def line(name: str, costs: Sequence[Cost], unit: str, units: float | None = None) -> None:
    """Print a line of the table."""
    processor, clock = (statistics.median(getattr(each, key) for each in costs) for key in ("processor", "clock"))
    rate = (costs[0].units if units is None else units) / processor / 1e6
    print(f"| {name} | {processor:.2f} | {clock:.2f} | {rate:.2f} M {unit}/s |", flush=True)


def commands(folder: Path, kind: str, num_tokens: int, repeats: int) -> None:
    """Measure the commands, and the files of rows, on rollouts of one kind."""
    rollouts, trie, packed = folder / "rollouts.jsonl", folder / "trie", folder / "packed"
    write_rollouts(rollouts, kind, num_tokens)
    name = f"{kind}, {num_tokens / 1e6:.0f} M tokens"
    build = [run("build-trie", rollouts, "--out", trie, "--workers", 1, "--overwrite") for _ in range(repeats)]
    tokens = totals(trie)["tokens_flat"]
    line(f"build-trie of JSONL, {name}", build, "tokens", tokens)
    rows = ["--capacity", CAPACITY, "--method", "contiguous", "--overwrite"]
    line(f"pack, {name}", [run("pack", trie, "--out", packed, *rows) for _ in range(repeats)], "tokens", tokens)
    line(f"stats --check, {name}", [run("stats", packed, "--check") for _ in range(repeats)], "tokens", tokens)
    packing = plan_packing(read_trie(trie), PackOptions(capacity=CAPACITY, method="contiguous"))
    written = folder / "written"

    def write() -> float:
        shutil.rmtree(written, ignore_errors=True)
        written.mkdir()
        return float(write_packed(packing, written, capacity=CAPACITY)["totals"]["tokens_packed"])

    line(f"write rows, {name}", [timed(write) for _ in range(repeats)], "row tokens")
    dataset = PackedDataset(str(packed), terms=True)
    reads = [timed(lambda: sum(dataset[i].num_tokens for i in range(len(dataset)))) for _ in range(repeats)]
    line(f"read rows, {name}", reads, "row tokens")
    for path in (trie, packed, written):
        shutil.rmtree(path)
    rollouts.unlink()


def workers(folder: Path, num_tokens: int, repeats: int) -> None:
    """Measure build-trie of JSONL and of Parquet with one worker and with two."""
    jsonl, parquet, trie = folder / "rollouts.jsonl", folder / "rollouts.parquet", folder / "trie"
    write_rollouts(jsonl, "heavy", num_tokens)
    write_parquet(jsonl, parquet)
    for path in (jsonl, parquet):
        bytes_of = set()
        for number in (1, 2):
            costs = [run("build-trie", path, "--out", trie, "--workers", number, "--overwrite") for _ in range(repeats)]
            bytes_of.add(digest(trie))
            name = f"build-trie of {path.suffix[1:]}, {num_tokens / 1e6:.0f} M tokens, --workers {number}"
            line(name, costs, "tokens", totals(trie)["tokens_flat"])
        if len(bytes_of) > 1:
            sys.exit(f"{path.name}: two workers wrote other bytes than one")


def write_parquet(jsonl: Path, parquet: Path) -> None:
    """Write the records of a JSONL file as row groups of 256."""
    writer, records = None, list[dict[str, Any]]()
    with jsonl.open() as file:
        for text in file:
            records.append(json.loads(text))
            if len(records) == 256:
                writer = _write_records(writer, parquet, records)
    if records:
        writer = _write_records(writer, parquet, records)
    assert writer is not None
    writer.close()


def _write_records(writer: Any, path: Path, records: list[dict[str, Any]]) -> Any:
    table = pa.Table.from_pylist(records)
    records.clear()
    writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
    writer.write_table(table)
    return writer


def totals(folder: Path) -> dict[str, Any]:
    """Return the totals of a directory."""
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
    return dict(manifest["totals"])


def digest(folder: Path) -> str:
    """Return one hash of the bytes of all data files of a directory."""
    sha256 = hashlib.sha256()
    for path in sorted(folder.glob("*.parquet")):
        sha256.update(path.read_bytes())
    return sha256.hexdigest()


def chats(expand: str, answers: int, number: int, repeats: int) -> None:
    """Tokenise conversations of an agent; the first one, for which the template is compiled, does not count."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.agent_chats import agent_chat

    tokenise = TrajectoryTokeniser(TokenisationJob(load_tokenizer(str(ROOT / "sample_data" / "tokenizer")), expand))

    def conversation(answers: int, seed: int) -> Trajectory:
        messages = agent_chat(answers, seed=seed, reasoning=False)
        weights = [float(message["role"] == "assistant") for message in messages]
        return Trajectory(f"t{seed}", f"made:{seed}", Chat(messages, weights))

    def distinct() -> float:
        total = 0
        for seed in range(number):
            samples = list(tokenise(conversation(answers, seed)))
            assert not any(isinstance(sample, Skipped) for sample in samples)
            # Tokens that prompts repeat do not count.
            total += max(len(sample.content.tokens) for sample in samples)  # type: ignore[union-attr]
        return total

    list(tokenise(conversation(12, 1000)))
    costs = [timed(distinct) for _ in range(repeats)]
    line(f"{number} conversations of {answers} answers, --expand {expand}", costs, "distinct tokens")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, nargs="*", default=[10e6, 100e6], help="flat tokens of the rollouts")
    parser.add_argument("--worker-tokens", type=float, default=500e6, help="flat tokens for one and two workers")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="folder for inputs and outputs")
    options = parser.parse_args()
    print(f"{platform.machine()}, Python {platform.python_version()}, {os.cpu_count()} cores, commit {commit()}\n")
    print("| step | processor s | clock s | rate of a core |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for expand in ("turns", "trajectory"):
            for answers, number in ANSWERS.items():
                chats(expand, answers, number, options.repeats)
        for num_tokens in map(int, options.tokens):
            for kind in FORKS:
                commands(Path(folder), kind, num_tokens, options.repeats)
        if options.worker_tokens:
            workers(Path(folder), int(options.worker_tokens), options.repeats)


if __name__ == "__main__":
    main()
