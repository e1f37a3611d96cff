"""The chat template of data: an entry of manifests, which a trained model is saved with.

    tokenizer --template_entry--> {"name": "chatml.jinja", "sha256": "...", "text": "{% for message ..."}
    entry, folder of a saved tokenizer --write_template--> the same folder, whose conversations look like the data

Data of token ids has an entry only if its template is given. Templates that no conversation of the data can use, such
as rag, are left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from treepack.errors import TreepackError
from treepack.files.json_text import set_field
from treepack.files.manifest import Manifest
from treepack.files.manifest_entries import TemplateEntry
from treepack.tokenise.chat_template import ChatTemplate
from treepack.tokenise.template.rendering import TemplateFile, templates_in
from treepack.tokenise.tokenization import fingerprint, read_tokenizer

_USED = ("default", "tool_use")
_OLD = "chat_template.json"  # of the processor of an older vision-language model, which reads chat_template.jinja too


def template_entry(tokenizer: Any, file: TemplateFile | None = None) -> TemplateEntry:
    """Return the entry for data that the template in `file` rendered, or else that of `tokenizer`.

    The hash is that of the text, or of both texts, each after its length in digits and a colon.

    Raises:
        TreepackError: as `ChatTemplate`.
    """
    name = Path(file.path).name if file else str(tokenizer.name_or_path)
    texts = (file.text, file.text) if file else ChatTemplate(tokenizer).texts
    if texts[0] == texts[1]:
        return {"name": name, "sha256": hashlib.sha256(texts[0].encode()).hexdigest(), "text": texts[0]}
    joined = "".join(f"{len(text)}:{text}" for text in texts)
    named = dict(zip(_USED, texts, strict=True))
    return {"name": name, "sha256": hashlib.sha256(joined.encode()).hexdigest(), "text": named}


def is_template_of(given: str | Mapping[str, str] | None, entry: TemplateEntry) -> bool:
    """Return True if the template or templates `given` by a tokenizer render conversations as `entry` does."""
    own, wanted = _used(given), _used(entry["text"])
    # Line by line, because a text file cannot keep "\r\n".
    texts = [[each.get(name, each.get("default", "")).splitlines() for name in _USED] for each in (own, wanted)]
    return texts[0] == texts[1]


def _used(given: str | Mapping[str, str] | None) -> Mapping[str, str]:
    return given if isinstance(given, Mapping) else {} if given is None else {"default": given}


def recorded_tokenizer(manifest: Mapping[str, Any], directory: object) -> str | None:
    """Return the name or path of the tokenizer that a manifest records, or None.

    A relative path that is not a folder here is looked up in the folders above `directory`, the first one of several
    that ", " joins. A tokenizer found there has the recorded vocabulary.
    """
    entry = manifest.get("tokenizer")
    if entry is None or not entry["name"]:
        return None
    if not os.path.isdir(entry["name"]):  # noqa: PTH112 (False for a name that cannot be a path)
        for folder in Path(str(directory).split(", ")[0]).resolve().parents:
            path = os.path.join(folder, entry["name"])  # noqa: PTH118
            with suppress(TreepackError):
                if os.path.isdir(path) and fingerprint(read_tokenizer(path))["sha256"] == entry["sha256"]:  # noqa: PTH112
                    return path
    return str(entry["name"])


def tokenizer_of(manifest: Manifest, name: str | None, *, where: object) -> Any:
    """Return the tokenizer `name`, or the one that made the directory `where`, with the chat template of its data.

    None if both are unknown.

    Raises:
        TreepackError: it cannot be loaded, or has another vocabulary than the tokenizer that made the directory.
    """
    entry, template = manifest.get("tokenizer"), manifest.get("chat_template")
    chosen = name or recorded_tokenizer(manifest, where)
    if not chosen:
        return None
    try:
        tokenizer = read_tokenizer(chosen)
    except TreepackError as error:
        if name:
            raise
        raise TreepackError(f"{where}: its tokenizer {chosen} cannot be loaded; give it with --tokenizer") from error
    if entry and entry["sha256"] != fingerprint(tokenizer)["sha256"]:
        raise TreepackError(f"{chosen}: is another tokenizer than {entry['name']}, which {where} was made with")
    if template:
        tokenizer.chat_template = template["text"]
    return tokenizer


def write_template(folder: Path, entry: TemplateEntry) -> None:
    """Make `entry` the chat template of the saved tokenizer in `folder`, in the file that has the old one.

    Nothing is written if the tokenizer has this template already.
    """
    path = folder / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if is_template_of(templates_in(folder, config), entry):
        return
    named = _used(entry["text"])
    file, others, old = (folder / name for name in ("chat_template.jinja", "additional_chat_templates", _OLD))
    as_files = file.exists() or others.exists() or old.exists()  # they count before tokenizer_config.json
    if config.get("chat_template"):
        listed = [{"name": name, "template": text} for name, text in named.items()]
        value = listed if len(named) > 1 else named["default"]
        path.write_bytes(set_field(path.read_bytes(), "chat_template", value))
        if not as_files:
            return
    old.unlink(missing_ok=True)
    shutil.rmtree(others, ignore_errors=True)
    file.write_text(named["default"], encoding="utf-8")
    if "tool_use" in named:
        others.mkdir()
        (others / "tool_use.jinja").write_text(named["tool_use"], encoding="utf-8")
