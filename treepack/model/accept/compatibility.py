"""Refusals, each in one sentence: models that cannot be trained exactly, and data that a model cannot be trained on.

    config                 --check_config-->  an error if the model cannot be trained exactly
    LoadedModel, its data  --check_fits-->    an error if the data does not fit the model

`check_config` finds by name the features that are known to break exactness. `probe.probe` finds the others: it runs a
small tree through the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from treepack.attention.indexed import index_top_k
from treepack.costs.model_fields import check_scans
from treepack.errors import MODELS_HINT, TreepackError
from treepack.model.accept.saved_tokenizer import saved_tokenizer
from treepack.model.accept.vocabulary import check_vocabulary
from treepack.recurrent.entry import model_obstacle as recurrent_obstacle

if TYPE_CHECKING:
    from treepack.files.manifest_entries import (
        TokenizerEntry,  # needs pyarrow, which benchmarks/check_gpu.py must run without
    )
    from treepack.model.loaded import LoadedModel

NOT_PASSED_ON = "its code does not pass subtree_end on to its recurrent layers"
OWN_STATE = "it carries a state from token to token in code of its own"

# Values of `layer_types` for softmax attention. "indexed_attention" is softmax attention on short paths (`indexed`).
_SOFTMAX_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "attention", "indexed_attention")
# Values for layers without attention, which treat each token alone.
_TOKEN_LAYERS = ("mlp", "moe")
# Values for layers with a state or a convolution, which `recurrent` computes; "hybrid" layers have attention as well.
_RECURRENT_LAYERS = ("linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding")
# Reasons to refuse a layer, by its value; other values are refused without a reason.
_REASONS = dict.fromkeys(
    ("heavily_compressed_attention", "compressed_sparse_attention"), "compresses runs of tokens to keys"
)
# Reasons to refuse a model, by a field of its configuration.
_POOLS = "its indexer selects pools of keys, and treepack skips only indexers that select single keys"
_FIELDS = {
    "ple_layer_ids": "its embeddings of n-grams hash neighbouring tokens of the row, which may be of other branches",
    "indexer_budget": _POOLS,
    "index_kpool": _POOLS,
}
# A learned table may have a few more entries than max_position_embeddings: OPT and BART have 2 more. 8 leaves a margin.
_EXTRA_POSITIONS = 8


def check_config(config: Any, *, source: str) -> None:
    """Refuse a model by its configuration: layers that mix tokens in a way that has no form on trees.

    Raises:
        TreepackError: if the configuration has such a layer or part; the message names it.
    """
    check_scans(source, config.model_type)
    for name, fault in _FIELDS.items():
        if getattr(config, name, None):
            raise TreepackError(f"{source}: {fault}; {MODELS_HINT}")
    for layer, kind in enumerate(_layer_kinds(config)):
        if kind in _RECURRENT_LAYERS and (reason := recurrent_obstacle(config)) is not None:
            raise TreepackError(f"{source}: layer {layer} is {kind!r}, which {reason}; {MODELS_HINT}")
        if kind not in (*_SOFTMAX_LAYERS, *_TOKEN_LAYERS, *_RECURRENT_LAYERS):
            reason = f", which {_REASONS[kind]}" if kind in _REASONS else ""
            raise TreepackError(
                f"{source}: layer {layer} is {kind!r}{reason}, and treepack computes only softmax attention, recurrent "
                f"layers and convolutions on trees; {MODELS_HINT}"
            )


def count_attention_layers(config: Any) -> int:
    """Return the number of layers that call attention."""
    # ["full_attention", "mlp", "full_attention", "moe"] -> 2; ["hybrid", "linear_attention"] -> 1
    without = {*_TOKEN_LAYERS, *_RECURRENT_LAYERS} - {"hybrid", "hybrid_sliding"}
    kinds = _layer_kinds(config)
    if without.intersection(kinds):
        return sum(kind not in without for kind in kinds)
    return int(config.num_hidden_layers)


def count_recurrent_layers(config: Any) -> tuple[int, int]:
    """Return the number of layers that call a convolution, and the number of layers that also call a scan."""
    # ["hybrid", "full_attention", "linear_attention", "conv"] -> (3, 2)
    kinds = [kind for kind in _layer_kinds(config) if kind in _RECURRENT_LAYERS]
    return len(kinds), len(kinds) - kinds.count("conv")


def _layer_kinds(config: Any) -> list[str]:
    return getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []


def position_limit(model: Any) -> tuple[int, str] | None:
    """Return the length of the longest path that the model computes exactly, and the reason; None for any length."""
    limits = [limit for limit in (_table_limit(model), _indexer_limit(model)) if limit is not None]
    return min(limits, default=None)


def _indexer_limit(model: Any) -> tuple[int, str] | None:
    size = index_top_k(model.config.get_text_config())
    return None if size is None else (size, f"its indexer selects {size} keys for each token of a longer one")


def _table_limit(model: Any) -> tuple[int, str] | None:
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return None
    words = model.get_input_embeddings()
    # No attribute marks a table of positions, so an embedding counts as one if it has about that many entries.
    tables = [m for m in model.base_model.modules() if isinstance(m, nn.Embedding) and m is not words]
    if any(limit <= table.num_embeddings <= limit + _EXTRA_POSITIONS for table in tables):
        return limit, "its positions are a learned table"
    # rope_parameters is one dict, or one dict per layer type: {"full_attention": {...}, "sliding_attention": {...}}
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *(each for each in ropes.values() if isinstance(each, dict))]:
        if rope.get("rope_type") in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings") or limit
            return original, f"its {rope['rope_type']} rotary frequencies then depend on the longest branch of the row"
    return None


def check_fits(loaded: LoadedModel, *, max_token_id: int, tokenizer: TokenizerEntry | None, max_position: int) -> None:
    """Refuse data that the model cannot be trained on.

    Args:
        loaded: the model.
        max_token_id: largest token id of the rows.
        tokenizer: the tokenizer that made the data, None if it is not known.
        max_position: largest position id of the rows.

    Raises:
        TreepackError: if token ids are outside the vocabulary, another tokenizer made the data, or positions are beyond
            the model's limit.
    """
    source, model = loaded.source, loaded.causal
    vocabulary = min(len(model.get_input_embeddings().weight), len(model.get_output_embeddings().weight))
    check_vocabulary(source, max_token_id, vocabulary)
    _check_tokenizer(source, tokenizer)
    limit = position_limit(model)
    if limit is not None and max_position >= limit[0]:
        raise TreepackError(f"{source}: {path_too_long('the data has', max_position, limit)}")


def path_too_long(subject: str, max_position: int, limit: tuple[int, str]) -> str:
    """Return the sentence for a path whose last token has `max_position`, and a limit from `position_limit`."""
    # ("a row has", 12, (12, "...")) -> "a row has a path of 13 tokens, ..."
    return (
        f"{subject} a path of {max_position + 1} tokens, and the model is exact on paths of up to {limit[0]}, because "
        f"{limit[1]}; truncate the trajectories to {limit[0]} tokens"
    )


def _check_tokenizer(source: str, expected: TokenizerEntry | None) -> None:
    tokenizer = saved_tokenizer(source) if expected is not None else None
    if expected is None or tokenizer is None:
        return
    from treepack.tokenise.tokenization import fingerprint

    # The hash is over the vocabulary by id, not over the name: a renamed copy of a tokenizer is accepted.
    if fingerprint(tokenizer)["sha256"] != expected["sha256"]:
        raise TreepackError(
            f"{source}: its tokenizer is not the one that made the data ({expected['name']}, "
            f"{expected['vocab_size']} tokens); tokenise the data with this model's tokenizer"
        )
