"""Refuse data that a model cannot be trained on: its vocabulary, tokenizer, positions and windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from treepack.attention import row_multiple
from treepack.errors import TreepackError
from treepack.model.load import LoadedModel

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def sliding_window(config: Any) -> int | None:
    """The window of a model's sliding layers, or None if it has none."""
    kinds = getattr(config, "layer_types", None)
    window: int | None = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    return window if slides else None


def position_limit(model: Any) -> tuple[int, str] | None:
    """Least position that the model has no exact answer for and why, or None if there is no such limit."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return None
    words = model.get_input_embeddings()
    tables = [m for m in model.base_model.modules() if isinstance(m, nn.Embedding) and m is not words]
    if any(limit <= table.num_embeddings <= limit + 8 for table in tables):
        return limit, "its positions are a learned table"
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *(each for each in ropes.values() if isinstance(each, dict))]:
        if rope.get("rope_type") in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings") or limit
            return original, f"its {rope['rope_type']} rotary frequencies then depend on the longest branch of the row"
    return None


def check_fits(loaded: LoadedModel, manifest: dict[str, Any], *, max_position: int) -> None:
    """Refuse data that the model cannot be trained on.

    Args:
        loaded: the model.
        manifest: manifest of the packed directory; capacity, max_token_id and tokenizer are read.
        max_position: greatest position id of the rows.

    Raises:
        TreepackError: ids beyond the vocabulary, another tokenizer, positions beyond the model's, or rows longer
            than its sliding window.
    """
    source, model = loaded.source, loaded.model
    vocabulary = min(len(model.get_input_embeddings().weight), len(model.get_output_embeddings().weight))
    if manifest["max_token_id"] >= vocabulary:
        raise TreepackError(
            f"{source}: the data holds the token id {manifest['max_token_id']} and the vocabulary ends at "
            f"{vocabulary - 1}; use the model whose tokenizer made the data"
        )
    _check_tokenizer(source, manifest.get("tokenizer"))
    limit = position_limit(model)
    if limit is not None and max_position >= limit[0]:
        raise TreepackError(
            f"{source}: the data has positions up to {max_position} and the model's end at {limit[0] - 1}, because "
            f"{limit[1]}; truncate the trajectories to {limit[0]} tokens"
        )
    multiple = row_multiple(loaded.attention)
    window, rows = sliding_window(model.config.get_text_config()), -(-manifest["capacity"] // multiple) * multiple
    if window is not None and window < rows:
        remedy = f"pack with --capacity {window // multiple * multiple}"
        if window < multiple:
            remedy = (
                f"pack with --capacity {window} and use --attention reference, "
                f"for {loaded.attention} pads rows to {multiple}"
            )
        raise TreepackError(f"{source}: its sliding window of {window} tokens is shorter than rows of {rows}; {remedy}")


def saved_tokenizer(source: str) -> Any:
    """The tokenizer that lies beside the weights at `source`, or None.

    Raises:
        TreepackError: if a hub name has none, or it cannot be loaded.
    """
    from treepack.ingest.tokenization import load_tokenizer

    path = Path(source)
    if path.suffix == ".json" or (path.is_dir() and not any((path / name).exists() for name in _TOKENIZER_FILES)):
        return None
    return load_tokenizer(source)


def _check_tokenizer(source: str, expected: dict[str, Any] | None) -> None:
    tokenizer = saved_tokenizer(source) if expected is not None else None
    if expected is None or tokenizer is None:
        return
    from treepack.ingest.tokenization import fingerprint

    found = fingerprint(tokenizer)
    if found["sha256"] != expected["sha256"]:
        raise TreepackError(
            f"{source}: its tokenizer is not the one that made the data ({expected['name']}, "
            f"{expected['vocab_size']} tokens); tokenise the data with this model's tokenizer"
        )
