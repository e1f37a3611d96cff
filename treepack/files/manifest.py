"""manifest.json: the content of a directory, how it was made, and the hash of every file. It is written last.

    Provenance --complete_manifest--> Manifest --write_manifest--> manifest.json
    manifest.json --read_manifest--> Manifest, every entry of which has its type

A directory without a manifest is unfinished, and `read_manifest` refuses it. The manifest contains a hash of itself
in one line, the sha256 of the file without this line:

    grep -v '^  "sha256"' manifest.json | sha256sum

So a change of any bit of the file is noticed, even if the JSON stays equal.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from treepack import __version__
from treepack.errors import TreepackError, quoted_value
from treepack.files import schema
from treepack.files.directory import MANIFEST
from treepack.files.manifest_entries import (
    FileEntry,
    InputEntry,
    ReadingEntry,
    TemplateEntry,
    TokenizerEntry,
    TrieEntry,
)
from treepack.files.manifest_values import check_values
from treepack.files.remote.address import AnyPath
from treepack.files.remote.cache import addresses_in
from treepack.files.remote.location import DirectoryLocation, locate


class Manifest(TypedDict):
    """The content of manifest.json. A trie has `share`, a packed directory has `capacity`."""

    format: str
    version: int
    treepack: str
    options: dict[str, Any]
    counts: dict[str, int]
    totals: dict[str, Any]
    tokenizer: TokenizerEntry | None
    chat_template: NotRequired[TemplateEntry]
    max_token_id: int
    files: list[FileEntry]
    sha256: NotRequired[str]  # only absent before it is written
    share: NotRequired[str]
    capacity: NotRequired[int]
    input: NotRequired[InputEntry]
    reading: NotRequired[ReadingEntry]
    skipped: NotRequired[dict[str, Any]]
    control_tokens: NotRequired[dict[str, Any]]
    conversations: NotRequired[dict[str, Any]]
    trie: NotRequired[TrieEntry]
    advantages: NotRequired[dict[str, Any]]
    logprobs: NotRequired[dict[str, Any]]
    critic: NotRequired[dict[str, Any]]
    routes: NotRequired[dict[str, Any]]


@dataclass(frozen=True)
class Provenance:
    """Origin of a directory: all entries of its manifest that do not follow from its files.

    `options` belong to the command; `counts` has a number for each reason of skipping and each note; `totals` are sums
    over trajectories and rows. `input` and `trie` are the sources; `reading` lets `build-trie` read a trie that it
    wrote, which copies with further columns do not have; `skipped` names rollouts that were skipped, and
    `control_tokens` rollouts that train control tokens of their text; `ingest.conversation_counts` describes
    `conversations`; `advantages`, `logprobs` and `critic` describe columns that a later command added, and `routes` the
    recorded experts that were kept.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    totals: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: TokenizerEntry | None = None
    chat_template: TemplateEntry | None = None
    input: InputEntry | None = None
    reading: ReadingEntry | None = None
    skipped: Mapping[str, Any] | None = None
    control_tokens: Mapping[str, Any] | None = None
    conversations: Mapping[str, Any] | None = None
    trie: TrieEntry | None = None
    advantages: Mapping[str, Any] | None = None
    logprobs: Mapping[str, Any] | None = None
    critic: Mapping[str, Any] | None = None
    routes: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, manifest: Manifest, names: Collection[str] | None = None) -> Provenance:
        """Return the provenance of a copy of an existing directory, or its entries `names`."""
        names = {entry.name for entry in fields(cls)} - {"reading"} if names is None else names
        return cls(**{name: value for name, value in manifest.items() if name in names})  # type: ignore[arg-type]


PACKED_FROM_TRIE = ("tokenizer", "chat_template", "skipped", "control_tokens", "conversations", "routes")

# Required entries: a type, or the entries of an object.
_FILE = {"name": str, "rows": int, "bytes": int, "sha256": str}
_COMMON = {"sha256": str, "options": dict, "counts": dict, "totals": dict, "max_token_id": int, "files": list}
_PACKED_TOTALS = {
    "num_rows": int,
    "num_trajectories": int,
    "num_pairs": int,
    "tokens_packed": int,
    "tokens_flat": int,
    "tiles_partial": int,
    "tiles_full": int,
    "token_ratio": float,
    "err": float,
    "fill": float,
}
_REQUIRED: dict[str, dict[str, Any]] = {
    schema.TRIE_FORMAT: {**_COMMON, "share": str},
    schema.PACKED_FORMAT: {
        **_COMMON,
        "capacity": int,
        "options": {"semantics": str, "normalize": str},
        "totals": _PACKED_TOTALS,
    },
}
_SKIPPED = {
    "num_rollouts": int,
    "num_skipped": int,
    "main_reason": str,
    "num_main_reason": int,
    "rollouts": list,
    "num_groups": int,
    "num_groups_lost": int,
    "num_without_group": int,
    "groups": list,
}

_CONVERSATIONS = {
    **dict.fromkeys("num_conversations num_rollouts num_samples tokens_flat num_turns num_parts".split(), int),
    **dict.fromkeys("num_split num_trees num_paths num_turns_on_paths num_merged_turns".split(), int),
    "append_only": dict.fromkeys("num_sequences tokens pairs targets num_absent".split(), int),
}

_KINDS = {schema.TRIE_FORMAT: "trie", schema.PACKED_FORMAT: "packed directory"}

_OWN_HASH = "sha256"
_MAX_NAME = 255  # bytes of a file name
_OWN_LINE = b'  "sha256"'  # entries of objects inside are indented by more

# Optional entries, which may also be null.
_OPTIONAL: dict[str, dict[str, Any]] = {
    "trie": {"path": str, "sha256": str},
    "conversations": _CONVERSATIONS,
    "tokenizer": {"name": str, "vocab_size": int, "sha256": str},
    "chat_template": {"name": str, "sha256": str},
    "reading": {"log": dict, "files": list},
    "logprobs": {},
    "critic": {},
    "routes": {},
    "skipped": _SKIPPED,
    "control_tokens": {"num_rollouts": int, "rollouts": list},
}


def complete_manifest(kind: str, provenance: Provenance, entries: Mapping[str, Any]) -> Manifest:
    """Return the manifest of a directory of format `kind`: `provenance`, the versions, and `entries` of its files."""
    known = {entry.name: getattr(provenance, entry.name) for entry in fields(provenance)}
    # `tokenizer` is written even if it is null; other entries that are null are left out.
    present = {name: value for name, value in known.items() if value is not None or name == "tokenizer"}
    fixed = {"format": kind, "version": schema.FORMAT_VERSION, "treepack": __version__}
    return cast(Manifest, {**present, **fixed, **entries})


def write_manifest(directory: Path, manifest: Manifest) -> Manifest:
    """Write `manifest` and return it with its hash; the directory is complete from then on.

    Raises:
        TreepackError: an entry is missing or has another type.
    """
    entries = {name: value for name, value in manifest.items() if name != _OWN_HASH}
    sealed = entries | {_OWN_HASH: hashlib.sha256(_as_text(entries)).hexdigest()}
    _check_entries(sealed, _REQUIRED[manifest["format"]], directory / MANIFEST, "")
    (directory / MANIFEST).write_bytes(_as_text(sealed))
    return cast(Manifest, sealed)


def _as_text(entries: Mapping[str, Any]) -> bytes:
    # Each entry starts a line. The line of the hash is never the last one, which has no comma, for "version" follows.
    text = json.dumps(entries, indent=2, ensure_ascii=False, sort_keys=True, allow_nan=False)
    return f"{text}\n".encode()


def _own_hash(content: bytes) -> str:
    """Return the hash that the content of a manifest must list: that of its lines without the line of the hash."""
    lines = content.split(b"\n")
    return hashlib.sha256(b"\n".join(line for line in lines if not line.startswith(_OWN_LINE))).hexdigest()


def read_manifest(directory: str | AnyPath | DirectoryLocation, kind: str | None = None) -> Manifest:
    """Read the manifest of `directory`; if `kind` is given, it must have that format.

    Raises:
        TreepackError: no manifest, a damaged one, or another format or version.
    """
    directory = directory if isinstance(directory, DirectoryLocation) else locate(directory)
    path = directory.file_name(MANIFEST)
    content = directory.read(MANIFEST)
    if content is None:
        raise _no_manifest(directory, kind)
    try:
        manifest = json.loads(content)
        format_name, version = str(manifest["format"]), manifest["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TreepackError(f"{path}: is damaged ({error}); write the directory again") from error
    if format_name not in _REQUIRED:
        raise TreepackError(
            f"{path}: has the format {quoted_value(format_name)}; expected {kind or ' or '.join(_REQUIRED)}"
        )
    if kind not in (None, format_name):
        raise _other_kind(directory, manifest)
    if version != schema.FORMAT_VERSION:
        raise TreepackError(
            f"{path}: has {format_name} version {quoted_value(version)}; this treepack reads version "
            f"{schema.FORMAT_VERSION}, so use the treepack that wrote it or write it again"
        )
    _check_entries(manifest, _REQUIRED[format_name], path, "")
    if manifest[_OWN_HASH] != _own_hash(content):
        raise TreepackError(f"{path}: was altered since it was written (its sha256 differs); write the directory again")
    for name, shape in _OPTIONAL.items():
        if manifest.get(name) is not None:
            _check_entries(manifest[name], shape, path, f"{name}.")
    if not manifest["files"]:
        raise TreepackError(f"{path}: is damaged (files is empty); write the directory again")
    for number, entry in enumerate(manifest["files"]):
        _check_entries(entry, _FILE, path, f"files[{number}].")
        _check_name(entry["name"], path)
    check_values(manifest, path)
    return cast(Manifest, manifest)


def _no_manifest(directory: DirectoryLocation, kind: str | None) -> TreepackError:
    """Return the error for a path without a manifest; it names the command that makes a directory of format `kind`."""
    wanted = _KINDS.get(kind or "", "trie or packed directory")
    if not directory.is_local:
        return TreepackError(f"{directory}: has no {MANIFEST}; give the address of a {wanted}")
    path = Path(directory.root)
    if not path.exists():
        return TreepackError(f"{directory}: no such directory; check the path")
    inner = path / ("trie" if kind == schema.TRIE_FORMAT else "packed")  # `path` is an output of treepack prepare
    if (inner / MANIFEST).is_file():
        return TreepackError(f"{directory}: is no {wanted}, but contains one; give {inner}")
    for trie in (path / "advantages", path / "trie"):  # of a `prepare` that ended before it packed
        if (trie / MANIFEST).is_file():
            pack = shlex.join(["treepack", "pack", str(trie), "--out", str(inner)])
            return TreepackError(f"{directory}: is no {wanted}, but contains a trie; pack it with: {pack}")
    fault = f"has no {MANIFEST}, so it is" if path.is_dir() else "is"
    remedy = "pack rollouts with: treepack prepare {} --out DATA"
    if kind == schema.TRIE_FORMAT:
        remedy = "make a trie of rollouts with: treepack build-trie {} --out TRIE"
    return TreepackError(f"{directory}: {fault} no {wanted}; {remedy.format(shlex.quote(str(directory)))}")


def _other_kind(directory: DirectoryLocation, manifest: dict[str, Any]) -> TreepackError:
    """Return the error for a trie in the place of packed rows, or packed rows in the place of a trie."""
    if manifest["format"] == schema.TRIE_FORMAT:
        name = shlex.quote(str(directory))
        return TreepackError(f"{directory}: is a trie; pack it first with: treepack pack {name} --out PACKED")
    origin = manifest.get("trie")
    path = f", {origin['path']}" if isinstance(origin, dict) and isinstance(origin.get("path"), str) else ""
    return TreepackError(f"{directory}: is packed already; give the trie that it was packed from{path}")


def _check_entries(value: Any, required: dict[str, Any], path: Path | str, prefix: str) -> None:
    if not isinstance(value, dict):
        raise TreepackError(f"{path}: is damaged ({prefix.rstrip('.')} is no object); write the directory again")
    for name, kind in required.items():
        nested = isinstance(kind, dict)
        if name not in value or type(value[name]) is not (dict if nested else kind):
            raise TreepackError(f"{path}: is damaged ({prefix}{name} is missing or wrong); write the directory again")
        if nested:
            _check_entries(value[name], kind, path, f"{prefix}{name}.")


def _check_name(name: str, path: str) -> None:
    """Refuse the name of a part that leaves the directory."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can name
        size = _MAX_NAME + 1
    if name in ("", ".", "..") or any(character in name for character in "/\\\0") or size > _MAX_NAME:
        raise TreepackError(
            f"{path}: names the part {quoted_value(name)}, which is not a file name of its directory; write it again"
        )


def trie_entry(directory: Path, name: str) -> TrieEntry:
    """Return the entry by which other directories refer to the trie at `directory`, whose path is shown as `name`."""
    return {"path": addresses_in(name), "sha256": file_sha256(directory / MANIFEST)}


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file in hex.

    Raises:
        TreepackError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise TreepackError(f"{path}: cannot be read ({error.strerror})") from error


def check_part(directory: Path, entry: FileEntry) -> Path:
    """Return the path of a part after checking its size and its hash against `entry`.

    Raises:
        TreepackError: the part is missing, truncated or altered, or the directory was replaced meanwhile.
    """
    check_size(locate(directory), entry)
    path = directory / entry["name"]
    if file_sha256(path) != entry["sha256"]:
        _refuse_replaced(locate(directory), entry)
        raise TreepackError(f"{path}: was altered since it was written (its sha256 differs); write it again")
    return path


def check_size(directory: DirectoryLocation, entry: FileEntry) -> None:
    """Check that a part is there and has the size that `entry` gives.

    Raises:
        TreepackError: the part is missing or truncated, or the directory was replaced meanwhile.
    """
    path, size = directory.file_name(entry["name"]), directory.size(entry["name"])
    if size != entry["bytes"]:
        _refuse_replaced(directory, entry)
    if size is None:
        raise TreepackError(f"{path}: is missing; write {directory} again")
    if size != entry["bytes"]:
        raise TreepackError(f"{path}: has {size} bytes, its manifest lists {entry['bytes']}; write it again")


def _refuse_replaced(directory: DirectoryLocation, entry: FileEntry) -> None:
    """Refuse a part that does not fit its entry because the directory was replaced after its manifest was read.

    Raises:
        TreepackError: the manifest that is there now has no such entry.
    """
    try:
        content = directory.read(MANIFEST)
        entries = [dict(entry)] if content is None else json.loads(content)["files"]
    except (TreepackError, ValueError, KeyError, TypeError, RecursionError):
        return  # damaged, which the caller reports
    facts = {"name": entry["name"], "bytes": entry["bytes"]}
    if entry["sha256"]:  # a slice of a trie has no hashes
        facts["sha256"] = entry["sha256"]
    if not any(isinstance(each, dict) and facts.items() <= each.items() for each in entries):
        raise TreepackError(f"{directory}: was replaced by another command while it was read; run the command again")
