"""The vocabulary of a model, compared with the token ids of data; needs no torch.

"models/qwen" | "config.json" | "Qwen/Qwen3-8B" --find_config--> fields of its config.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from treepack.errors import TreepackError
from treepack.files.model_source import VALUE_FILE, base_beside
from treepack.files.remote.address import is_address
from treepack.files.remote.hub import download_snapshot, refuse_missing, snapshot

CONFIG_FILE, ADAPTER_FILE = "config.json", "adapter_config.json"
NO_CRITIC = f"has no {VALUE_FILE}, so it is not a critic; train one with `treepack train --loss value` or --value-coef"


def check_vocabulary(source: str, max_token_id: int, size: int) -> None:
    """Refuse data with a token id that a model with `size` tokens does not have.

    Raises:
        TreepackError: naming the id and the last one of the vocabulary.
    """
    if max_token_id >= size:
        raise TreepackError(
            f"{source}: the data holds the token id {max_token_id} and the vocabulary ends at {size - 1}; use the "
            "model whose tokenizer made the data"
        )


def check_same_words(teacher: str, words: int, student: str, size: int) -> None:
    """Refuse a teacher whose distributions have `words` words, for a student with another number.

    Raises:
        TreepackError: naming both models.
    """
    if words != size:
        raise TreepackError(
            f"{teacher}: its output layer has {words:,} words and that of {student} {size:,}; write its likeliest "
            "words with `treepack logprobs --column teacher --top-k 64`, and omit --teacher"
        )


def find_config(source: str) -> dict[str, Any] | None:
    """Return the fields of a model's config.json, or None if it is at an address or has none.

    Of a model of the hub this file is downloaded, if there is no cached copy. Of an adapter this is the base model.

    Raises:
        TreepackError: `source` is a path without a model, or a name that the hub does not have; or a file is not JSON
            or has no type.
    """
    path = _find(source)
    base = {} if path is None else _read_fields(path / ADAPTER_FILE)
    if path is not None and isinstance(name := base.get("base_model_name_or_path"), str):
        path = _find(base_beside(path, name))
    fields = {} if path is None else _read_fields(path / CONFIG_FILE if path.is_dir() else path)
    if (fields or (path and path.is_file())) and not isinstance(fields.get("model_type"), str):
        raise TreepackError(f"{source}: has no model_type; expected the config.json of a causal language model")
    return fields or None


def is_adapter(source: str) -> bool:
    """Return True if a model on this machine or the hub is an adapter of PEFT; False at an address."""
    path = _find(source)
    return path is not None and (path / ADAPTER_FILE).is_file()


def _find(source: str) -> Path | None:
    """Return the folder or the config file of a model, as `find_config`; None if it is at an address."""
    if is_address(source):
        return None
    files = (CONFIG_FILE, ADAPTER_FILE)
    refuse_missing(source, kind="model", files=files)
    if source.endswith(".json"):
        return Path(source)
    return snapshot(source, (), download=False) or download_snapshot(source, files)


def _read_fields(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if it cannot be read, because loading the model reports that."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return {}
    except (ValueError, RecursionError) as error:
        raise TreepackError(f"{path}: malformed JSON ({error}); expected a file that save_pretrained wrote") from error
    return fields if isinstance(fields, dict) else {}
