"""The tokenizer that is saved with the weights of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treepack.files.model_source import local_source
from treepack.model.adapters.adapter import find_adapter

# transformers finds a tokenizer by one of these files; a directory without any of them has no tokenizer to compare.
NAMES_OF_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def saved_tokenizer(source: str) -> Any:
    """Return the tokenizer saved with the weights at `source`, or None if a local source has none.

    An adapter without a tokenizer has that of its base.

    Raises:
        TreepackError: if a model on the hub has no tokenizer, or the tokenizer cannot be loaded.
    """
    from treepack.tokenise.tokenization import load_tokenizer  # needs pyarrow, which loading a model does not

    source = local_source(source)
    path = Path(source)
    if path.suffix == ".json":
        return None
    if path.is_dir() and not any((path / name).exists() for name in NAMES_OF_TOKENIZERS):
        adapter = find_adapter(source)
        return None if adapter is None else saved_tokenizer(adapter.base)
    return load_tokenizer(source)
