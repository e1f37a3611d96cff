"""`treepack build-trie`: raw rollouts to a directory of prefix tries."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .output import percent, show, token_progress
from .reading import read_options, reading_options

if TYPE_CHECKING:
    from treepack.ingest.readers.inputs import InputHash
    from treepack.ingest.stream import Reading


@click.command()
@click.argument("inputs", metavar="INPUT...", nargs=-1, required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory to write.")
@reading_options
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
def build_trie(inputs: tuple[str, ...], out: Path, overwrite: bool, share: str, **reading: Any) -> None:
    """Read rollouts and write their prefix tries.

    INPUT is a file, a directory, a glob, or - for standard input; .gz and .zst are read directly. Prints what was
    read and skipped, N_flat (tokens if every trajectory stands alone), N_tree (tokens of the tries) and POR, the
    potential overlap ratio 1 - N_tree / N_flat.
    """
    import time
    from collections import Counter

    from treepack.analysis import stats
    from treepack.files.directory import finished_directory, refuse_existing
    from treepack.ingest import stream as ingest
    from treepack.ingest.readers.inputs import InputHash
    from treepack.ingest.tokenization import load_tokenizer
    from treepack.trie.files import write_trie
    from treepack.trie.out_of_core import build_large_trie

    refuse_existing(out, overwrite=overwrite, inputs=inputs)
    options, counts, digest, began = read_options(reading), Counter[str](), InputHash(), time.perf_counter()
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
    with finished_directory(out, overwrite=overwrite) as temporary:
        batches = ingest.read_columns(inputs, options, counts, tokenizer=tokenizer, input_hash=digest)
        built = build_large_trie(token_progress(batches, description="reading"), share=share, folder=temporary)
        totals = stats.trie_totals(built.trie)
        built.release()
        manifest = _manifest(options, share, digest, tokenizer) | {
            "totals": totals,
            "counts": dict(sorted(counts.items())),
        }
        write_trie(built.trie, temporary, manifest, release=built.release)
    seconds = time.perf_counter() - began
    show(
        {
            "files": digest.num_files,
            **{name.replace("num_", ""): value for name, value in totals.items() if name.startswith("num_")},
            "trained tokens": totals["tokens_trained"],
            **counts,
            "N_flat": totals["tokens_flat"],
            "N_tree": totals["tokens_tree"],
            "POR": percent(totals["por"]),
            "tokens per second": totals["tokens_flat"] / seconds,
        }
    )


def _manifest(options: Reading, share: str, digest: InputHash, tokenizer: Any) -> dict[str, Any]:
    from treepack.ingest.tokenization import fingerprint

    return {
        "options": {
            **{"expand": options.expand, "format": options.format, "share": share, "tools": options.tools},
            **{"reward_key": options.reward_key, "train_all": options.train_all},
            **({"normalize_ids": True} if options.normalize_ids else {}),
        },
        "input": {"sha256": digest.hexdigest(), "num_files": digest.num_files},
        "tokenizer": fingerprint(tokenizer) if tokenizer else None,
    }
