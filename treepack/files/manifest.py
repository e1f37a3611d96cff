"""manifest.json: what a directory holds, how it was made, and the hash of every file; written last.

new_manifest -> ... -> write_manifest           read_manifest -> a manifest whose every entry has its kind
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from treepack import __version__
from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.directory import MANIFEST
from treepack.files.location import Location, locate

Manifest = dict[str, Any]

# What a manifest must hold: a type, or the entries of an object.
_FILE = {"name": str, "rows": int, "bytes": int, "sha256": str}
_COMMON = {"options": dict, "counts": dict, "totals": dict, "max_token_id": int, "files": list}
_SHAPES: dict[str, dict[str, Any]] = {
    schema.TRIE_FORMAT: _COMMON | {"share": str},
    schema.PACKED_FORMAT: _COMMON
    | {
        "capacity": int,
        "options": {"semantics": str, "normalize": str},
        "totals": {
            **{"num_rows": int, "num_trajectories": int, "num_pairs": int, "tokens_packed": int, "tokens_flat": int},
            **{"tiles_partial": int, "tiles_full": int},
            **{"token_ratio": float, "err": float, "fill": float},
        },
    },
}

# What it may hold besides.
_OPTIONAL: dict[str, dict[str, Any]] = {
    "trie": {"path": str, "sha256": str},
    "tokenizer": {"name": str, "vocab_size": int, "sha256": str},
    "logprobs": {},
}


def new_manifest(kind: str, given: Manifest) -> Manifest:
    """`given` with format and versions, and with empty entries where it has no options, counts, totals or tokenizer."""
    fixed = {"format": kind, "version": schema.FORMAT_VERSION, "treepack": __version__}
    return {"options": {}, "counts": {}, "totals": {}, "tokenizer": None} | given | fixed


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `manifest`; the directory is complete from then on.

    Raises:
        TreepackError: an entry is missing or of another kind.
    """
    _check_shape(manifest, _SHAPES[manifest["format"]], directory / MANIFEST, "")
    text = json.dumps(manifest, indent=2, ensure_ascii=False, sort_keys=True, allow_nan=False) + "\n"
    (directory / MANIFEST).write_text(text, encoding="utf-8")


def read_manifest(directory: Path | str | Location, kind: str | None = None) -> Manifest:
    """The manifest of `directory`, whose format must be `kind` where given.

    Raises:
        TreepackError: no manifest, damaged, of another format or version.
    """
    directory = directory if isinstance(directory, Location) else locate(directory)
    path = directory.file_name(MANIFEST)
    content = directory.read(MANIFEST)
    if content is None:
        raise TreepackError(
            f"{directory}: has no {MANIFEST}; it is not a treepack directory, or its writing was cut off"
        )
    try:
        manifest = json.loads(content)
        found, version = str(manifest["format"]), manifest["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise TreepackError(f"{path}: is damaged ({error}); write the directory again") from error
    if found not in _SHAPES or kind not in (None, found):
        raise TreepackError(f"{path}: holds the format {found!r}; expected {kind or ' or '.join(_SHAPES)}")
    if version != schema.FORMAT_VERSION:
        raise TreepackError(
            f"{path}: has {found} version {version}; this treepack reads version {schema.FORMAT_VERSION}, "
            "so use the treepack that wrote it or write it again"
        )
    _check_shape(manifest, _SHAPES[found], path, "")
    for name, shape in _OPTIONAL.items():
        if manifest.get(name) is not None:
            _check_shape(manifest[name], shape, path, f"{name}.")
    if type(manifest["totals"].get("tokens_trained", 0)) is not int:
        raise TreepackError(f"{path}: is damaged (totals.tokens_trained is wrong); write the directory again")
    if not manifest["files"]:
        raise TreepackError(f"{path}: is damaged (files is empty); write the directory again")
    for number, entry in enumerate(manifest["files"]):
        _check_shape(entry, _FILE, path, f"files[{number}].")
    return dict(manifest)


def _check_shape(found: Any, shape: dict[str, Any], path: Path | str, prefix: str) -> None:
    if not isinstance(found, dict):
        raise TreepackError(f"{path}: is damaged ({prefix.rstrip('.')} is no object); write the directory again")
    for name, kind in shape.items():
        nested = isinstance(kind, dict)
        if name not in found or type(found[name]) is not (dict if nested else kind):
            raise TreepackError(f"{path}: is damaged ({prefix}{name} is missing or wrong); write the directory again")
        if nested:
            _check_shape(found[name], kind, path, f"{prefix}{name}.")


def file_sha256(path: Path) -> str:
    """Hex digest of a file.

    Raises:
        TreepackError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise TreepackError(f"{path}: cannot be read ({error.strerror})") from error


def check_part(directory: Path, entry: dict[str, Any]) -> Path:
    """Path of the part that `entry` of a manifest names, present, of its size and of its hash.

    Raises:
        TreepackError: missing, truncated or altered.
    """
    check_size(locate(directory), entry)
    path = directory / str(entry["name"])
    if file_sha256(path) != entry["sha256"]:
        raise TreepackError(f"{path}: was altered since it was written (its sha256 differs); write it again")
    return path


def check_size(directory: Location, entry: dict[str, Any]) -> None:
    """See that the part that `entry` of a manifest names is there and of its size.

    Raises:
        TreepackError: missing or truncated.
    """
    path, size = directory.file_name(entry["name"]), directory.size(entry["name"])
    if size is None:
        raise TreepackError(f"{path}: is missing; write {directory} again")
    if size != entry["bytes"]:
        raise TreepackError(f"{path}: has {size} bytes, its manifest says {entry['bytes']}; write it again")
