"""`treepack augment`: queries for a rollout system that start inside successful rollouts.

The cut of a rollout is `treepack.research.pros.augmentation`. This file reads entropies and values from their sources,
writes the queries with their text and prints a summary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .choices import WordChoice
from .config import common_options
from .output import next_rollouts, percent, refuse_suffix, reserve_table, show, show_end
from .paths import PACKED, TRIE, WRITE
from .progress import progress
from .sections import SectionedCommand

if TYPE_CHECKING:
    from treepack.files.manifest import Manifest
    from treepack.files.remote.address import AnyPath
    from treepack.research.pros.augmentation import AugmentedQuery
    from treepack.research.pros.signals import PerToken, TokenSignals
    from treepack.trie.trie import Trie

# A copy of the library's tuple, because a help page must not import numpy.
_BOUNDARIES = ("token", "turn")


@click.command(cls=SectionedCommand)
@click.argument("trie", type=TRIE)
@click.option("--out", type=WRITE, required=True, help="JSONL file to write, one query per line.")
@click.option(
    "--packed",
    type=PACKED,
    help="Packed directory of this trie with entropies, an output of treepack logprobs --entropies.",
)
@click.option(
    "--signals",
    metavar="FILE",
    help="JSONL or Parquet with entropies, a critic's values or both per rollout id, from the rollout system; may be "
    "the rollout file itself.",
)
@click.option("--tokenizer", metavar="NAME_OR_DIR", help="Tokenizer to decode the text of each query.")
@click.option(
    "--boundary",
    type=WordChoice(_BOUNDARIES),
    default="token",
    show_default=True,
    help="Places to cut: before any trained token, or only at the start of a turn (a run of trained tokens).",
)
@click.option(
    "--success-above", type=float, default=0.0, show_default=True, help="Rollouts with a higher reward are successful."
)
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@common_options
def augment(
    trie: AnyPath,
    out: AnyPath,
    packed: AnyPath | None,
    signals: str | None,
    tokenizer: str | None,
    boundary: str,
    success_above: float,
    overwrite: bool,
) -> None:
    """Write the valuable prefix of every successful rollout as a new query.

    The prefix ends before the token of highest entropy in the middle half of the generated tokens. If a critic's values
    are given, only the tenth of these tokens with the highest values is considered. Roll out the written queries like
    any others, and copy their fields to the rollouts. treepack build-trie then trains none of the reused tokens; the
    field untrained_prefix is their number.
    """
    import orjson

    from treepack.errors import TreepackError
    from treepack.files import schema
    from treepack.files.directory import finished_file
    from treepack.files.manifest import read_manifest
    from treepack.files.remote.cache import local_copy
    from treepack.research.pros import augmentation
    from treepack.research.pros.signals import read_signals
    from treepack.trie.store.trie_files import read_trie

    refuse_suffix(out)
    # A file with these columns is an output of this command, so --overwrite may replace it.
    columns = {"query_id", "num_reused", "prompt_token_ids"}
    reserve_table(out, [trie, packed, signals], columns=columns, overwrite=overwrite)
    directory = local_copy(trie)
    manifest = read_manifest(directory, schema.TRIE_FORMAT)
    if packed is None and signals is None:
        raise TreepackError(
            f"{trie}: there are no entropies to cut by; pack the trie, run treepack logprobs --entropies and give its "
            "output with --packed, or give a file of entropies with --signals"
        )
    packed, read = None if packed is None else local_copy(packed), read_trie(directory)
    recorded = None if signals is None else read_signals(signals, read)
    entropies, values = _inputs(directory, read, packed, recorded)
    result = augmentation.augment(read, entropies, values=values, boundary=boundary, success_above=success_above)
    texts = _texts(result.queries, tokenizer, manifest)
    num_exact = 0
    with finished_file(out, overwrite=overwrite) as temporary, temporary.open("wb") as file:
        for query, (text, is_exact) in zip(result.queries, texts, strict=True):
            file.write(orjson.dumps(query.record(text)) + b"\n")
            num_exact += is_exact
    if tokenizer is None:
        click.echo("note: no --tokenizer, so text is null and queries are token ids only", err=True)
    if recorded is not None and recorded.num_unknown:
        click.echo(f"note: {recorded.num_unknown:,} records of {signals} name rollouts that {trie} lacks", err=True)
    _show(read, result.counts, result.queries, None if tokenizer is None else num_exact)
    show_end(out, then=next_rollouts(out))


def _inputs(
    trie: Path, read: Trie, packed: Path | None, recorded: TokenSignals | None
) -> tuple[PerToken, PerToken | None]:
    """Return entropies and values by trajectory, from the packed rows or the recorded signals.

    Raises:
        TreepackError: both sources have entropies, or the packed rows have none or belong to another trie.
    """
    from treepack.errors import TreepackError
    from treepack.files import schema
    from treepack.files.directory import MANIFEST
    from treepack.files.manifest import file_sha256, read_manifest
    from treepack.pack.files import read_rows
    from treepack.research.pros.signals import entropies_of_terms

    values = None if recorded is None else recorded.values
    entropies = None if recorded is None else recorded.entropies
    if packed is None:
        return entropies or [None] * read.num_trajectories, values
    if entropies is not None:
        raise TreepackError(f"{packed} and --signals both have entropies; give one of them")
    # Trajectory ids alone could match another trie by chance; the hash of the manifest cannot.
    origin = read_manifest(packed, schema.PACKED_FORMAT).get("trie")
    if origin is not None and origin["sha256"] != file_sha256(trie / MANIFEST):
        raise TreepackError(f"{packed}: was packed from another trie than {trie}; give that trie, or pack this one")

    # A generator, so only one row is in memory at a time.
    def rows() -> Iterator[Any]:
        for row in progress(read_rows(packed), description="reading"):
            if row.terms is None or row.terms.entropy is None:
                raise TreepackError(f"{packed}: its rows have no term_entropy; run treepack logprobs --entropies on it")
            yield row.trajectory_ids, row.terms.trajectory, row.terms.entropy

    return entropies_of_terms(read, rows()), values


def _texts(queries: list[AugmentedQuery], name: str | None, manifest: Manifest) -> Iterator[tuple[str | None, bool]]:
    """Yield the text of each query, and True if it encodes to the same ids again.

    Raises:
        TreepackError: a tokenizer that is not the tokenizer of the trie.
    """
    from treepack.errors import TreepackError
    from treepack.tokenise.encoder import Encoder
    from treepack.tokenise.tokenization import fingerprint, read_tokenizer

    if name is None:
        yield from ((None, False) for _ in queries)
        return
    tokenizer = read_tokenizer(name)
    # The fingerprint is missing if rollouts were recorded as token ids. Then the number of tokens is the only check.
    known = manifest.get("tokenizer")
    if known is not None and known["sha256"] != fingerprint(tokenizer)["sha256"]:
        raise TreepackError(f"{name}: is another tokenizer than {known['name']}, with which the trie was made; give it")
    if manifest["max_token_id"] >= len(tokenizer):
        raise TreepackError(
            f"{name}: has {len(tokenizer)} tokens and the trie contains the id {manifest['max_token_id']}; give the "
            "tokenizer of the policy"
        )
    encoder = Encoder(tokenizer)
    for query in queries:
        ids = query.prompt_token_ids.tolist()
        # Without cleaning up: a space before a comma must survive, or the text would encode to other ids.
        text = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
        yield text, encoder.encode(text).tolist() == ids


def _show(read: Trie, counts: Counter[str], queries: list[AugmentedQuery], num_exact: int | None) -> None:
    # Tokens in total: reused is the part of the prompts that rollouts generated.
    prompt = sum(len(query.prompt_token_ids) for query in queries)
    reused = sum(query.num_reused for query in queries)
    texts = {} if num_exact is None else {"texts that encode to other ids": len(queries) - num_exact}
    show(
        {
            "trajectories": read.num_trajectories,
            **{f"rollouts {reason}": count for reason, count in sorted(counts.items())},
            "augmented queries": len(queries),
            "parents": len({query.parent_group for query in queries}),
            "tokens reused": f"{reused:,}, {percent(reused / max(1, prompt))} of their prompts",
            **texts,
        }
    )
