"""Writing packed rows, before and after: seconds of processor and clock, and the size of the files.

    .venv/bin/python benchmarks/data_path/packed_write.py                         5 minutes
    .venv/bin/python benchmarks/data_path/packed_write.py --tokens 10_000_000     1 minute

For tries with much and with little sharing, of 10 and of 100 million tokens: `write_packed` of the rows of a plan by
"contiguous", which lays out the rows and writes the files (without reading the trie and planning), and the whole
command `pack`. Then the time to read all rows as training reads them. The values of all columns must be equal.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq
from before_after import OUT, Versions, arguments, header, program, treepack
from token_tries import KINDS, make_trie

CAPACITY = 65_536


def write(trie: str, out: str) -> None:
    """Write the rows of a trie; print the seconds of processor and clock, and the row tokens."""
    from treepack.pack.files import write_packed
    from treepack.pack.options import PackOptions
    from treepack.pack.packing import plan_packing
    from treepack.trie.store.trie_files import read_trie

    packing = plan_packing(read_trie(Path(trie)), PackOptions(capacity=CAPACITY, method="contiguous"))
    Path(out).mkdir(parents=True)
    processor, clock = time.process_time(), time.perf_counter()
    manifest = write_packed(packing, Path(out), capacity=CAPACITY)
    seconds = [time.process_time() - processor, time.perf_counter() - clock]
    print(json.dumps([*seconds, manifest["totals"]["tokens_packed"]]))


def read(packed: str) -> None:
    """Read all rows of a packed directory, with terms; print the seconds of processor and clock."""
    from treepack.data.dataset import PackedDataset

    dataset = PackedDataset(packed, terms=True)
    processor, clock = time.process_time(), time.perf_counter()
    tokens = sum(dataset[i].num_tokens for i in range(len(dataset)))
    print(json.dumps([time.process_time() - processor, time.perf_counter() - clock, tokens]))


def alternate(name: str, versions: Versions, commands: dict[str, list[str]], sizes: dict[str, int]) -> None:
    """Print a line of the table from the seconds that the commands print, and the sizes of their outputs."""
    runs: dict[str, list[list[float]]] = {side: [] for side in commands}
    with tempfile.TemporaryDirectory(dir=versions.folder) as folder:
        for number in range(versions.repeats):
            for side, command in commands.items():
                out = Path(folder, f"{side}-{number}")
                runs[side].append(json.loads(versions.measure(side, command, out).output.splitlines()[-1]))
                if out.exists():
                    sizes[side] = sum(path.stat().st_size for path in out.glob("*.parquet"))
    medians = {side: [statistics.median(column) for column in zip(*run, strict=True)] for side, run in runs.items()}
    cells = [f"{a:.2f} | {b:.2f} | {a / b:.2f}" for a, b in list(zip(*medians.values(), strict=True))[:2]]
    rate = f"{medians['after'][2] / medians['after'][0] / 1e6:.1f} M row tokens/s"
    print(f"| {name} | {' | '.join(cells)} | {rate} |", flush=True)


def refuse_difference(packed: dict[str, Path]) -> None:
    """Compare every column of the first parts of two packed directories."""
    before, after = (pq.ParquetFile(path / "part-00000.parquet") for path in packed.values())
    if before.metadata.num_rows != after.metadata.num_rows:
        sys.exit("the parts have other rows")
    for group in range(before.num_row_groups):
        if not before.read_row_group(group).equals(after.read_row_group(group)):
            sys.exit(f"row group {group} differs")


def compare(versions: Versions, kind: str, num_tokens: int) -> None:
    """Print the lines of one trie."""
    folder, name = versions.folder, f"{kind}, {num_tokens // 10**6} M tokens"
    trie, sizes = make_trie(folder, kind, num_tokens), dict[str, int]()
    command = program(Path(__file__), "--write", trie, OUT)
    alternate(f"write rows, {name}", versions, {"before": command, "after": command}, sizes)
    options = ["--capacity", CAPACITY, "--method", "contiguous", "--quiet"]
    versions.compare(f"pack, {name}", treepack("pack", trie, "--out", OUT, *options))
    packed = {side: folder / f"packed-{side}" for side in ("before", "after")}
    for side, path in packed.items():
        path.parent.mkdir(exist_ok=True)
        versions.measure(side, command, path)
    refuse_difference(packed)
    commands = {side: program(Path(__file__), "--read", path) for side, path in packed.items()}
    alternate(f"read rows, {name}", versions, commands, {})
    ratio = sizes["after"] / sizes["before"]
    print(f"| size in MB, {name} | {sizes['before'] / 1e6:.1f} | {sizes['after'] / 1e6:.1f} | {ratio:.3f} | | | | |")
    for path in packed.values():
        for part in path.iterdir():
            part.unlink()
        path.rmdir()


def main() -> None:
    """Print the table."""
    if sys.argv[1:2] == ["--write"]:
        write(*sys.argv[2:])
        return
    if sys.argv[1:2] == ["--read"]:
        read(*sys.argv[2:])
        return
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=[10**7, 10**8])
    options = parser.parse_args()
    with Versions(options.before, options.folder, options.repeats) as versions:
        header()
        for num_tokens in options.tokens:
            for kind in KINDS:
                compare(versions, kind, num_tokens)


if __name__ == "__main__":
    main()
