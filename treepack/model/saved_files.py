"""The files of a saved model that are not weights: the bytes of its source, with changed fields written into them.

    folder | hub name | address --copied_files--> {"config.json": b"...", "tokenizer.json": b"...", "merges.txt": ...}
    config file                 --copied_files--> {"config.json": b"..."}
    the same                    --check_files---> an error if transformers cannot read them
    the same                    --write_files---> files in the directory of the saved model

They are collected when a run opens, so that it cannot fail at the end because of them, and written after its last step.
Nothing is serialised again: `rope_theta` stays in the place where an older transformers wrote it and reads it, and
unknown fields stay.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from treepack.files.json_text import set_field, without_field
from treepack.files.model_source import NOT_THE_MODEL, local_source
from treepack.files.remote.hub import load_fault, snapshot
from treepack.model.accept.vocabulary import ADAPTER_FILE, CONFIG_FILE
from treepack.model.foreign_errors import translate_errors
from treepack.model.stored_weights import QUANTIZATION_FIELDS, stored_kind
from treepack.model.weights.files import weight_files

GENERATION_FILE = "generation_config.json"
_TEMPLATES = "additional_chat_templates"
# A tokenizer and its chat templates.
TOKENIZER_FILES = (
    *("tokenizer*.json", "tokenizer.model*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.tiktoken", "*.spm", "spiece.model", "sentencepiece*.model", "tekken.json", "chat_template*", "*.jinja"),
    f"{_TEMPLATES}/*.jinja",
)
# Also configurations, processors, licences and code. Weights in other formats are left out: they are untrained.
_ALL_FILES = (*TOKENIZER_FILES, "*.json", "*.txt", "*.model", "*.py", "*.md", "LICEN[CS]E*", "NOTICE*")
_NOT_COPIED = (*NOT_THE_MODEL, "*.index.json", ADAPTER_FILE)


def copied_files(
    source: str | Path, patterns: Sequence[str] = _ALL_FILES, *, but: Collection[str] = _NOT_COPIED
) -> dict[str, bytes]:
    """Return the content of the files of a model whose names match `patterns` and not `but`, by name.

    Args:
        source: a model directory or its address, a hub name, or a config file.
        patterns: of names in the directory.
        but: patterns of names that are left out.

    Raises:
        TreepackError: a file cannot be read, or the hub does not answer as before.
    """
    local = local_source(source)
    try:
        if local.endswith(".json"):
            return {CONFIG_FILE: Path(local).read_bytes()} if "*.json" in patterns or CONFIG_FILE in patterns else {}
        folder = snapshot(local, patterns) or next(iter((weight_files(source) or {}).values())).parent
        return read_files(folder, patterns, but=but)
    except Exception as error:  # of the disk or of the hub's client
        raise load_fault(str(source), error, kind="model") from error


def read_files(folder: Path, patterns: Sequence[str] = ("*",), *, but: Collection[str] = ()) -> dict[str, bytes]:
    """Return the content of the files in a folder, and of its chat templates, as `copied_files`.

    Raises:
        OSError: a file cannot be read.
    """
    paths = [path for path in (*folder.iterdir(), *folder.glob(f"{_TEMPLATES}/*")) if path.is_file()]
    named = {path.relative_to(folder).as_posix(): path for path in sorted(paths)}
    return {
        name: path.read_bytes()
        for name, path in named.items()
        if any(fnmatch(name, each) for each in patterns) and not any(fnmatch(name, each) for each in but)
    }


def with_model(files: Mapping[str, bytes], model: Any) -> dict[str, bytes]:
    """Return the files of a source with config.json for `model`, which has its weights or the weights of its text half.

    Only a field that the source lacks is added: the name of the class, by which engines find their code. Weights that
    were read as whole weights are no longer called quantised.
    """
    content = files[CONFIG_FILE]
    fields = json.loads(content)
    config = model.config
    if fields["model_type"] != config.model_type:  # a text half alone, see `text_half.choose_config`
        whole, fields = fields, fields.get("text_config") or {}
        names = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")
        fields = {**{name: whole[name] for name in names if name in whole}, **fields}
        fields |= {"model_type": config.model_type, "tie_word_embeddings": config.tie_word_embeddings}
        fields.pop("architectures", None)
        content = json.dumps(fields, indent=2).encode() + b"\n"
    if stored_kind(fields) is not None and stored_kind(config) is None:  # whole weights, of `--dequantize`
        for name in QUANTIZATION_FIELDS:
            content = without_field(content, name)
    if not fields.get("architectures"):
        content = set_field(content, "architectures", [type(model).__name__])
    return {**files, CONFIG_FILE: content}


def with_end_tokens(files: Mapping[str, bytes], ends: Iterable[int]) -> tuple[dict[str, bytes], tuple[int, ...]]:
    """Return the files with `ends` among the tokens at which generation stops, and the ids that are new there.

    Without a new id, generation_config.json stays as it is, or absent.
    """
    config = json.loads(files.get(CONFIG_FILE, b"{}"))
    content = files.get(GENERATION_FILE)
    known = json.loads(content or b"{}").get("eos_token_id", config.get("eos_token_id"))
    known = [] if known is None else [known] if isinstance(known, int) else list(known)
    new = tuple(token for token in ends if token not in known)
    if not new:
        return dict(files), ()
    if content is None:  # without this file, transformers takes these fields from config.json
        start = {name: config[name] for name in ("bos_token_id", "pad_token_id") if config.get(name) is not None}
        content = json.dumps(start, indent=2).encode() + b"\n"
    return {**files, GENERATION_FILE: set_field(content, "eos_token_id", [*known, *new])}, new


def check_files(files: Mapping[str, bytes], source: str | Path) -> None:
    """Write the files and read them again with transformers, as a user of the saved model does.

    Raises:
        TreepackError: one of them cannot be read.
    """
    from transformers import AutoConfig, GenerationConfig

    with (
        tempfile.TemporaryDirectory() as folder,
        translate_errors(f"{source}: its saved copy could not be read", "save the model again with transformers"),
    ):
        write_files(files, Path(folder))
        if CONFIG_FILE in files:
            AutoConfig.from_pretrained(folder)
        if GENERATION_FILE in files:
            GenerationConfig.from_pretrained(folder)


def write_files(files: Mapping[str, bytes], directory: Path) -> None:
    """Write the files into `directory`; files of the same name are replaced.

    Raises:
        OSError: the disk fails.
    """
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
