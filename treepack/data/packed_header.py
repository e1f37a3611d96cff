"""The head of a packed directory: its manifest and the names of its columns, without torch and without reading rows.

    packed/, s3://..., hf://... --read_header--> PackedHeader   a few kilobytes, however large the directory is
    headers --join_manifests--> one manifest                    refuses directories that do not train together

`dataset.PackedDataset` has the same attributes, so that a check of columns or of manifests takes either of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from treepack.errors import TreepackError
from treepack.files.manifest import Manifest, check_size, read_manifest
from treepack.files.prepared import PACKED, prepared_part
from treepack.files.remote.address import AnyPath, as_path
from treepack.files.remote.location import locate
from treepack.files.schema import PACKED_FORMAT, TERMS


class PackedSource(Protocol):
    """One packed directory: a header, or an open dataset."""

    @property
    def path(self) -> Path | str:
        """The directory."""

    @property
    def manifest(self) -> Manifest:
        """Its manifest."""

    @property
    def term_columns(self) -> tuple[str, ...]:
        """The columns of `schema.TERMS` that it has."""


@dataclass(frozen=True)
class PackedHeader:
    """A packed directory by its manifest and the footer of its first part."""

    path: Path | str
    manifest: Manifest
    term_columns: tuple[str, ...]


def read_header(path: str | AnyPath) -> PackedHeader:
    """Read the header of a packed directory.

    Raises:
        TreepackError: it cannot be reached, is unfinished, or has another format; or a part is missing or truncated.
    """
    location = locate(prepared_part(as_path(path), PACKED))
    manifest = read_manifest(location, PACKED_FORMAT)
    for entry in manifest["files"] if location.is_local else manifest["files"][:1]:
        check_size(location, entry)
    # All parts have the columns of the first one: one command writes the directory.
    with location.open_parquet(manifest["files"][0]["name"], pa.schema([])) as part:
        names = set(part.schema_arrow.names)
    return PackedHeader(
        Path(location.root) if location.is_local else location.name,
        manifest,
        tuple(name for name in TERMS.names if name in names),
    )


_SAME = {"tokenizer": "the tokenizer of the model", "chat_template": "the same --chat-template"}


def shared_origin(sources: Sequence[PackedSource]) -> dict[str, Any]:
    """Return the tokenizer and the chat template with which `sources` were made, as far as their manifests have them.

    Raises:
        TreepackError: they differ.
    """
    shared: dict[str, Any] = {}
    for name, remedy in _SAME.items():
        for source in sources:
            entry: Any = source.manifest.get(name)
            first, known = shared.setdefault(name, (source, entry)) if entry else (source, entry)
            if entry and entry["sha256"] != known["sha256"]:
                one, other = (f"{each['name']} (sha256 {each['sha256'][:8]})" for each in (entry, known))
                raise TreepackError(
                    f"{source.path}: was made with the {name.replace('_', ' ')} {one} and {first.path} with {other}; "
                    f"build both with {remedy}"
                )
    return {name: entry for name, (_, entry) in shared.items()}


def join_manifests(sources: Sequence[PackedSource]) -> dict[str, Any]:
    """Return one manifest for several directories, see `mixture.MixedDataset.manifest`.

    Raises:
        TreepackError: their tokenizers or chat templates differ, or their loss weights cannot be compared.
    """
    manifests = [source.manifest for source in sources]
    for source, manifest in zip(sources, manifests, strict=True):
        for name in ("normalize", "semantics"):
            one, other = manifests[0]["options"][name], manifest["options"][name]
            if one != other:
                raise TreepackError(
                    f"{source.path}: was packed with --{name} {other} and {sources[0].path} with --{name} {one}, so "
                    "their loss weights do not compare; pack both with the same one"
                )
    return {
        "capacity": max(manifest["capacity"] for manifest in manifests),
        "max_token_id": max(manifest["max_token_id"] for manifest in manifests),
        "options": manifests[0]["options"],
        "files": [entry for manifest in manifests for entry in manifest["files"]],
        **shared_origin(sources),
    }
