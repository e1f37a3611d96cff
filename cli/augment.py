"""`treepack augment`: queries that start inside rollouts which succeeded, for a rollout system to go on with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .output import percent, progress, refuse_output, refuse_suffix, show

if TYPE_CHECKING:
    from treepack.files.manifest import Manifest
    from treepack.rl.pros.signals import PerToken, Signals
    from treepack.trie.trie import Trie

BOUNDARIES = ("token", "turn")


@click.command()
@click.argument("trie", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="JSONL file to write, a query per line.")
@click.option(
    "--packed",
    type=click.Path(path_type=Path),
    help="Packed directory of this trie that treepack logprobs --entropies wrote: where entropies come from.",
)
@click.option(
    "--signals",
    metavar="FILE",
    help="JSONL or Parquet of entropies, values (a critic's) or both per rollout id, as the rollout system recorded "
    "them; the rollout file itself if it has them.",
)
@click.option("--tokenizer", metavar="NAME_OR_DIR", help="Tokenizer that writes the text of each query too.")
@click.option(
    "--boundary",
    type=click.Choice(BOUNDARIES),
    default="token",
    show_default=True,
    help="Where to cut: before any trained token, or only where a run of them, a turn, begins.",
)
@click.option(
    "--success-above", type=float, default=0.0, show_default=True, help="Rollouts with a greater reward succeeded."
)
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
def augment(
    trie: Path,
    out: Path,
    packed: Path | None,
    signals: str | None,
    tokenizer: str | None,
    overwrite: bool,
    **options: Any,
) -> None:
    """Write the valuable prefix of every rollout that succeeded as a new query.

    The prefix ends before the token of highest entropy in the middle half of what the rollout generated, among the
    highest tenth by value where a critic's values are given. Roll out the queries of FILE like any other, passing
    their fields on: treepack build-trie then trains nothing of the reused tokens, which untrained_prefix counts.
    """
    import orjson

    from treepack.errors import TreepackError
    from treepack.files import schema
    from treepack.files.directory import finished_file
    from treepack.files.manifest import read_manifest
    from treepack.rl.pros import augmentation
    from treepack.rl.pros.signals import read_signals
    from treepack.trie.files import read_trie

    refuse_suffix(out)
    columns = {"query_id", "num_reused", "prompt_token_ids"}
    refuse_output(out, [trie, packed, signals], columns=columns, overwrite=overwrite)
    if packed is None and signals is None:
        raise TreepackError(
            f"{trie}: there are no entropies to cut by; pack the trie, run treepack logprobs --entropies and give what "
            "it writes with --packed, or a file of entropies with --signals"
        )
    manifest, read = read_manifest(trie, schema.TRIE_FORMAT), read_trie(trie)
    given = None if signals is None else read_signals(signals, read)
    entropies, values = _inputs(trie, read, packed, given)
    found = augmentation.augment(read, entropies, values=values, **options)
    texts = _texts(found.queries, tokenizer, manifest)
    same = 0
    with finished_file(out) as temporary, temporary.open("wb") as file:
        for query, (text, exact) in zip(found.queries, texts, strict=True):
            file.write(orjson.dumps(query.record(text)) + b"\n")
            same += exact
    if tokenizer is None:
        click.echo("note: no --tokenizer, so text is null and queries are token ids only", err=True)
    if given is not None and given.num_unknown:
        click.echo(f"note: {given.num_unknown:,} records of {signals} are of rollouts that {trie} lacks", err=True)
    _show(read, found.counts, found.queries, None if tokenizer is None else same)


def _inputs(trie: Path, read: Trie, packed: Path | None, given: Signals | None) -> tuple[PerToken, PerToken | None]:
    """Entropies and values by trajectory, from wherever they are given."""
    from treepack.errors import TreepackError
    from treepack.files import schema
    from treepack.files.directory import MANIFEST
    from treepack.files.manifest import file_sha256, read_manifest
    from treepack.pack.files import read_rows
    from treepack.rl.pros.signals import entropies_of_terms

    values = None if given is None else given.values
    entropies = None if given is None else given.entropies
    if packed is None:
        return entropies or [None] * read.num_trajectories, values
    if entropies is not None:
        raise TreepackError(f"{packed} and --signals both have entropies; give one of them")
    origin = read_manifest(packed, schema.PACKED_FORMAT).get("trie")
    if origin is not None and origin["sha256"] != file_sha256(trie / MANIFEST):
        raise TreepackError(f"{packed}: was packed from another trie than {trie}; give that one, or pack this one")

    def rows() -> Iterator[Any]:
        for row in progress(read_rows(packed), description="reading"):
            if row.terms is None or row.terms.entropy is None:
                raise TreepackError(f"{packed}: its rows have no term_entropy; run treepack logprobs --entropies on it")
            yield row.trajectory_ids, row.terms.trajectory, row.terms.entropy

    return entropies_of_terms(read, rows()), values


def _texts(queries: list[Any], name: str | None, manifest: Manifest) -> Iterator[tuple[str | None, bool]]:
    """The text of each query, and whether it encodes to the same ids again."""
    from treepack.errors import TreepackError
    from treepack.ingest.tokenization import fingerprint, load_tokenizer

    if name is None:
        yield from ((None, False) for _ in queries)
        return
    tokenizer = load_tokenizer(name)
    known = manifest.get("tokenizer")
    if known is not None and known["sha256"] != fingerprint(tokenizer)["sha256"]:
        raise TreepackError(f"{name}: is another tokenizer than {known['name']}, which the trie was made with; give it")
    if manifest["max_token_id"] >= len(tokenizer):
        raise TreepackError(
            f"{name}: has {len(tokenizer)} tokens and the trie holds the id {manifest['max_token_id']}; give the "
            "tokenizer of the policy"
        )
    for query in queries:
        ids = query.prompt_token_ids.tolist()
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        yield text, tokenizer(text, add_special_tokens=False)["input_ids"] == ids


def _show(read: Trie, counts: Counter[str], queries: list[Any], same: int | None) -> None:
    prompt = sum(len(query.prompt_token_ids) for query in queries)
    reused = sum(query.num_reused for query in queries)
    texts = {} if same is None else {"texts that encode to other ids": len(queries) - same}
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
