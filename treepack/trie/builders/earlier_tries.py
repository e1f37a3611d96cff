"""Tries among the inputs of a build: each is a sorted run already, so a trie can grow.

    inputs, options --earlier_tries--> {path: manifest}       refused if one build could not have made them
    trie directory --store_trie--> StoredRun, its log         in any process with a spool

The result is that of one build of all rollouts, so a directory keeps facts that the files of a trie lack: the ids
that were read (`schema.RENAMED`), the log of reading and the hashes of the input files (`ReadingEntry`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.directory import MANIFEST
from treepack.files.input_files.inputs import InputHash
from treepack.files.manifest import Manifest, read_manifest
from treepack.files.manifest_entries import ReadingEntry, TemplateEntry, TokenizerEntry
from treepack.files.parts import read_row_groups, token_slices
from treepack.files.remote.address import as_path, is_address
from treepack.files.remote.cache import borrowed_directory
from treepack.files.remote.location import locate
from treepack.ingest.options import BuildOptions
from treepack.ingest.read_log import ReadLog
from treepack.tokenise.saved_template import template_entry
from treepack.tokenise.tokenization import fingerprint
from treepack.trajectory import Int32, Int64
from treepack.trie.builders.in_memory import partitions
from treepack.trie.builders.spool import RunIndex, SpoolFiles, StoredRun, append_run, spool_disk
from treepack.trie.nodes import shared_with_previous
from treepack.trie.store.trie_files import read_trie
from treepack.trie.trie import Trie

_TABLE_TOKENS = 1 << 23  # of trajectories whose rows are written at a time
_COPY_TOKENS = 1 << 22
_PLACES = ["tree_id", "node_id"]  # other numbers in a trie with more trajectories


def earlier_tries(inputs: Sequence[str], options: BuildOptions, tokenizer: Any) -> dict[str, Manifest]:
    """Return the manifests of the tries among `inputs`, which the build with `options` and their `tokenizer` continues.

    Raises:
        TreepackError: a trie is damaged or given twice; or it has routes, columns of a later command, or another
            version, tokenizer, chat template or share.
    """
    found = {name: read_manifest(as_path(name), schema.TRIE_FORMAT) for name in inputs if _is_trie(name)}
    known, seen = fingerprint(tokenizer) if tokenizer else None, dict[str, str]()
    if known is None and len(found) == len(inputs):  # nothing is tokenised
        known = entry_of(found, "tokenizer")
    template: TemplateEntry | None = entry_of(found, "chat_template")
    if template is not None and tokenizer:
        template = template_entry(tokenizer, options.template_file())
    for name, manifest in found.items():
        _check(name, manifest, options, known)
        own = manifest.get("chat_template")
        if own is not None and template is not None and own["sha256"] != template["sha256"]:
            raise TreepackError(
                f"{name}: its conversations have the chat template {own['name']}, and others {template['name']}; give "
                "that template, or build it again from its rollouts"
            )
        first = seen.setdefault(manifest["sha256"], name)
        if first != name:
            raise TreepackError(f"{name}: is the same trie as {first}; give it once")
    return found


def _is_trie(name: str) -> bool:
    if name == "-" or not (is_address(name) or Path(name).is_dir()):
        return False
    content = locate(as_path(name)).read(MANIFEST)
    with suppress(ValueError, RecursionError):  # no manifest of treepack
        value = json.loads(content or b"null")
        return isinstance(value, dict) and value.get("format") == schema.TRIE_FORMAT
    return False


def _check(name: str, manifest: Manifest, options: BuildOptions, tokenizer: TokenizerEntry | None) -> None:
    again = "build it again from its rollouts"
    if options.keep_routes or "routes" in manifest:
        raise TreepackError(f"{name}: tries with recorded routes cannot be joined; build one trie of all rollouts")
    if "reading" not in manifest:
        raise TreepackError(
            f"{name}: has columns of a later command, or an older treepack wrote it; give the trie that build-trie "
            f"wrote, or {again}"
        )
    if manifest["share"] != options.share:
        raise TreepackError(f"{name}: has --share {manifest['share']}; give that too, or {again}")
    own = manifest["tokenizer"]
    if (own and own["sha256"]) != (tokenizer and tokenizer["sha256"]):
        names = [f"the tokenizer {each['name']}" if each else "no tokenizer" for each in (own, tokenizer)]
        raise TreepackError(f"{name}: was built with {names[0]}, and this build has {names[1]}; give that, or {again}")


def store_trie(path: str, spool: SpoolFiles, *, number: int, piece: int, memory: int) -> tuple[StoredRun, ReadLog, int]:
    """Store the trie in the directory `path` as a run; return it with the log of its reading, and its tokens.

    Args:
        path: a path or an address.
        spool: the files of this process.
        number: of the spool.
        piece: number of this input among all pieces of the input.
        memory: bytes; a larger trie is mapped from files in the folder of the spool.

    Raises:
        TreepackError: the directory is damaged, or the disk fails.
    """
    with borrowed_directory(as_path(path)) as directory:
        manifest = read_manifest(directory, schema.TRIE_FORMAT)
        log = log_of(path, manifest)
        trie = read_trie(directory, memory=memory, folder=spool.folder)
        ids, arrival = as_read(trie.trajectories["trajectory_id"], _renamed(directory, manifest))
        partition, distinct = partitions(trie.trajectories, share=trie.share)
        index = RunIndex(partition.astype(np.int32), _shared(trie, partition), trie.lengths.astype(np.int32), arrival)
        with spool_disk(spool.folder):
            pieces = [(piece, trie.num_trajectories)]
            run = append_run(spool, number, _tokens(trie), _tables(trie, ids), index, distinct, pieces)
    return run, log, trie.tokens_flat


def log_of(path: str, manifest: Manifest) -> ReadLog:
    """Return the log of reading of the trie at `path`.

    Raises:
        TreepackError: the manifest was altered.
    """
    try:
        return ReadLog.of_record(manifest["reading"]["log"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TreepackError(f"{path}: is damaged (its log of reading, {error}); build it again") from error


def _renamed(directory: Path, manifest: Manifest) -> pa.Table:
    if not any(entry["name"].startswith("renamed") for entry in manifest["files"]):
        return schema.RENAMED.empty_table()
    return pa.concat_tables(read_row_groups(directory, manifest, "renamed", schema.RENAMED))


def as_read(ids: pa.ChunkedArray, renamed: pa.Table) -> tuple[pa.ChunkedArray, Int32]:
    """Return the ids that were read, and numbers by which equal ones of a source have the order in which they came."""
    arrival = np.arange(len(ids), dtype=np.int32)
    if not len(renamed):
        return ids, arrival
    places = pc.index_in(ids, renamed["trajectory_id"])
    rows = np.flatnonzero(pc.is_valid(places).to_numpy(zero_copy_only=False))
    # Rows 1, 4, 7 are the places 2, 0, 1 of `renamed`, which has the order of arrival: 4, 7, 1 get the numbers 1, 4, 7.
    arrival[rows[np.argsort(places.drop_null().to_numpy())]] = rows
    return pc.coalesce(renamed["read_id"].take(places), ids), arrival


def _shared(trie: Trie, partition: Int64) -> Int32:
    """Return the tokens that each trajectory shares with the one before it in the same partition."""
    if trie.share == "none":
        offsets = np.concatenate([[0], np.cumsum(trie.lengths)])
        order = list(range(trie.num_trajectories))
        return np.array(shared_with_previous(trie.tokens, offsets, partition, order), np.int32)
    # The nodes of a trajectory that none before it has begin after the last node of the one before: end_node [1 2 2 3]
    # -> nodes 0, 2, 3, 3. The third has no new node, and shares all of its tokens.
    first = np.concatenate([[0], trie.end_node[:-1] + 1])
    is_new = first <= trie.end_node
    shared = trie.lengths.astype(np.int32)
    shared[is_new] = trie.depth[first[is_new]]
    return shared


def _tokens(trie: Trie) -> Iterator[Int32]:
    for begin in range(0, trie.tokens_tree, _COPY_TOKENS):
        yield trie.tokens[begin : begin + _COPY_TOKENS]
        trie.storage.release()


def _tables(trie: Trie, ids: pa.ChunkedArray) -> Iterator[pa.Table]:
    table = trie.trajectories.drop_columns(_PLACES)
    field = table.schema.field("trajectory_id")
    table = table.set_column(table.schema.get_field_index(field.name), field, ids)
    for begin, end in token_slices(trie.lengths, _TABLE_TOKENS):
        yield table.slice(begin, end - begin)
        trie.storage.release()


def entry_of(tries: Mapping[str, Manifest], name: str) -> Any:
    """Return the entry `name` of the manifests, which all of `tries` that have one agree on, or None."""
    return next((value for each in tries.values() if (value := each.get(name)) is not None), None)


def reading_entry(log: ReadLog, digest: InputHash) -> ReadingEntry:
    """Return the facts about the reading of a trie that a later build needs."""
    return {"log": log.as_record(), "files": sorted(sha256 for _, sha256 in digest.files)}
