"""A causal language model of transformers, made ready to train on packed rows, or refused in one sentence.

    config.json | directory | hub name --load_model--> LoadedModel
    LoadedModel, Batch --hidden_states--> [T, D] --row_loss--> scalar

Tree attention gives exact gradients only if attention is all that mixes tokens and it is plain softmax attention over
the visible pairs. `check_config` refuses by name what is known to break that; `probe` then runs a tree of twelve tokens
and compares every branch with the branch alone under transformers' own attention, which catches what nobody has named.
Data that does not suit the model is refused by `check_fits`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from treepack.attention import IMPLEMENTATIONS, build_block_mask, register
from treepack.attention.flex import BLOCK
from treepack.batch import Batch
from treepack.errors import TreepackError
from treepack.loss import CHUNK, weighted_nll

# Relative error of a branch in the tree against the branch alone; transformers' eager softmax is float32 at best.
PROBE_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

_SOFTMAX_LAYERS = ("full_attention", "sliding_attention", "attention")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_ONLY = "treepack trains models whose every layer is plain softmax attention"

# 0 - 1 - 2 - 3 with 4 - {5, 6 - 7 - 8} and 9 - 10 - 11 beside it, as `parent` and `subtree_end`.
_PROBE_PARENT = (-1, 0, 1, 2, 0, 4, 4, 6, 7, 0, 9, 10)
_PROBE_END = (12, 4, 4, 4, 9, 6, 9, 9, 9, 12, 12, 12)
_PROBE_LEAVES = (3, 5, 8, 11)


@dataclass(frozen=True)
class LoadedModel:
    """A model that passed every check of its own.

    `model` is in eval mode on its device; `attention` is "reference" or "flex"; `notes` are remarks for the user.
    """

    model: Any
    source: str
    attention: str
    notes: tuple[str, ...]

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device


def load_model(
    source: str | Path,
    *,
    attention: str = "auto",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> LoadedModel:
    """Load a causal language model with tree attention.

    Args:
        source: a model directory, a hub name, or a config file ending in .json, which gets random weights.
        attention: "flex", "reference", or "auto": flex on a GPU, the reference elsewhere.
        dtype: dtype of the weights.
        device: where the model goes.
        seed: seed of random weights.

    Raises:
        TreepackError: if the model cannot be loaded or cannot be trained exactly; the message says why.
    """
    device = torch.device(device)
    chosen = choose_attention(attention, device)
    register()
    config = _read_config(source)
    check_config(config, source=str(source))
    notes = _without_dropout(config)
    with _refusing(source), without_bars():
        model = _build(source, config, IMPLEMENTATIONS[chosen], dtype, seed)
    model = model.to(device).eval()
    probe(model, source=str(source))
    return LoadedModel(model, str(source), chosen, notes)


def choose_attention(attention: str, device: torch.device) -> str:
    """Resolve "auto" to the attention that suits `device`."""
    if attention not in ("auto", *IMPLEMENTATIONS):
        raise TreepackError(f"attention is {attention!r}; expected auto, {' or '.join(IMPLEMENTATIONS)}")
    if attention == "auto":
        return "flex" if device.type == "cuda" else "reference"
    return attention


@contextmanager
def _refusing(source: str | Path) -> Iterator[None]:
    """Turn what transformers raises for a model it cannot load into one sentence; the cause stays attached."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TreepackError(
            f"{source}: transformers cannot load it with tree attention ({first}); expected a causal language model"
        ) from error


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep transformers' own progress bars off stderr, which belongs to the command line."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _read_config(source: str | Path) -> Any:
    from transformers import AutoConfig

    with _refusing(source):
        if not str(source).endswith(".json"):
            return AutoConfig.from_pretrained(str(source)).get_text_config()
        fields = json.loads(Path(source).read_text(encoding="utf-8"))
        return AutoConfig.for_model(fields.pop("model_type"), **fields).get_text_config()


def _build(source: str | Path, config: Any, implementation: str, dtype: torch.dtype, seed: int) -> Any:
    from transformers import AutoModelForCausalLM

    if not str(source).endswith(".json"):
        return AutoModelForCausalLM.from_pretrained(
            str(source), config=config, attn_implementation=implementation, dtype=dtype
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=dtype)


def _without_dropout(config: Any) -> tuple[str, ...]:
    """Set every dropout of `config` to 0 and say so: a shared token has one hidden state for all its branches."""
    names = [
        name
        for name, value in sorted(vars(config).items())
        if isinstance(value, float) and value > 0 and ("drop" in name or "jitter" in name)
    ]
    for name in names:
        setattr(config, name, 0.0)
    return tuple(f"{name} set to 0: a token shared by branches has one hidden state for all of them" for name in names)


def check_config(config: Any, *, source: str) -> None:
    """Refuse a model by what its configuration says: layers that are no softmax attention, capped scores or logits.

    Raises:
        TreepackError: naming the layer or the option.
    """
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    for layer, kind in enumerate(kinds):
        if kind not in _SOFTMAX_LAYERS:
            raise TreepackError(f"{source}: layer {layer} is {kind!r}; {_ONLY}")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None) is not None:
            raise TreepackError(f"{source}: {name} is {getattr(config, name)}; {_ONLY}, with logits left as they are")


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
    window = sliding_window(model.config.get_text_config())
    rows = -(-manifest["capacity"] // BLOCK) * BLOCK
    if window is not None and window < rows:
        raise TreepackError(
            f"{source}: its sliding window of {window} tokens is shorter than rows of {rows}; "
            f"pack with --capacity {max(BLOCK, window // BLOCK * BLOCK)}"
        )


def load_tokenizer(source: str) -> Any:
    """The tokenizer that lies beside the weights at `source`, or None."""
    from transformers import AutoTokenizer

    path = Path(source)
    if path.suffix == ".json" or (path.is_dir() and not any((path / name).exists() for name in _TOKENIZER_FILES)):
        return None
    with _refusing(source):
        return AutoTokenizer.from_pretrained(source)


def _check_tokenizer(source: str, expected: dict[str, Any] | None) -> None:
    tokenizer = load_tokenizer(source) if expected is not None else None
    if expected is None or tokenizer is None:
        return
    from treepack.tokenization import fingerprint

    found = fingerprint(tokenizer)
    if found["sha256"] != expected["sha256"]:
        raise TreepackError(
            f"{source}: its tokenizer is not the one that made the data ({expected['name']}, "
            f"{expected['vocab_size']} tokens); tokenise the data with this model's tokenizer"
        )


def hidden_states(loaded: LoadedModel, batch: Batch) -> Tensor:
    """Hidden states [T, D] of a packed row, after the final norm."""
    # A model switched to another attention would take no notice of subtree_end and train on wrong gradients.
    chosen = loaded.model.config.get_text_config()._attn_implementation
    assert chosen == IMPLEMENTATIONS[loaded.attention], f"the model attends through {chosen}"
    extra: dict[str, Any] = {"subtree_end": batch.subtree_end[None]}
    if loaded.attention == "flex":
        extra["block_mask"] = build_block_mask(extra["subtree_end"])
    output = loaded.model.base_model(
        input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False, **extra
    )
    states: Tensor = output.last_hidden_state
    return states[0]


def row_loss(loaded: LoadedModel, batch: Batch, *, chunk: int = CHUNK) -> Tensor:
    """Sum over the row's targets of loss_weight * nll, a float64 scalar; see `loss.weighted_nll`."""
    head = loaded.model.get_output_embeddings()
    states = hidden_states(loaded, batch)
    return weighted_nll(states, head.weight, batch.targets, bias=getattr(head, "bias", None), chunk=chunk)


def checkpoint_layers(model: Any) -> None:
    """Recompute each layer in the backward pass instead of keeping its activations.

    Raises:
        TreepackError: if the model has no checkpointing.
    """
    if not model.supports_gradient_checkpointing:
        raise TreepackError(f"{type(model).__name__} has no gradient checkpointing; train without it")
    # transformers renamed it within version 5.
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


@contextmanager
def attention_of(model: Any, name: str) -> Iterator[None]:
    """Run `model` under another of transformers' attention implementations."""
    own = model.config.get_text_config()._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(own)


def probe(model: Any, *, source: str) -> None:
    """Run a small tree and refuse a model that does not treat each branch as if it were alone.

    Three things are checked: every layer calls tree attention once; the hidden states of every branch are those
    of the branch alone under transformers' eager attention; the logits are the output layer of the hidden states.

    Raises:
        TreepackError: saying which of them fails.
    """
    if model.base_model is model or model.get_output_embeddings() is None:
        raise TreepackError(f"{source}: its hidden states and output layer are not apart; {_ONLY} and one output layer")
    device = next(iter(model.parameters())).device
    vocabulary = len(model.get_input_embeddings().weight)
    ids = torch.arange(1, len(_PROBE_PARENT) + 1, device=device) * 7919 % vocabulary
    with torch.no_grad():
        tree, logits = _probe_tree(model, ids, source)
        _compare(
            logits, _output_layer(model, tree), f"{source}: its logits are not its output layer of the hidden states"
        )
        branches = [torch.tensor(_path(leaf), device=device) for leaf in _PROBE_LEAVES]
        with attention_of(model, "eager"):
            alone = [model.base_model(input_ids=ids[path][None], use_cache=False)[0][0] for path in branches]
    for path, states in zip(branches, alone, strict=True):
        _compare(tree[path], states, f"{source}: a branch in a tree gets other hidden states than alone")


def _probe_tree(model: Any, ids: Tensor, source: str) -> tuple[Tensor, Tensor]:
    """Hidden states [T, D] and logits [T, V] of the probe tree."""
    positions = torch.tensor([len(_path(i)) - 1 for i in range(len(ids))], device=ids.device)
    end = torch.tensor(_PROBE_END, device=ids.device)
    calls: list[nn.Module] = []
    row = {"input_ids": ids[None], "position_ids": positions[None], "subtree_end": end[None], "use_cache": False}
    try:
        tree: Tensor = model.base_model(**row, record=calls)[0][0]
        logits: Tensor = model(**row).logits[0]
    except TypeError as error:
        raise TreepackError(f"{source}: it does not hand subtree_end to its attention ({error}); {_ONLY}") from error
    layers = model.config.get_text_config().num_hidden_layers
    if len(calls) != layers or len(set(calls)) != layers:
        raise TreepackError(f"{source}: {len(set(calls))} of its {layers} layers call tree attention once; {_ONLY}")
    return tree, logits


def _path(token: int) -> list[int]:
    return [] if token < 0 else [*_path(_PROBE_PARENT[token]), token]


def _output_layer(model: Any, states: Tensor) -> Tensor:
    head = model.get_output_embeddings()
    return linear(states, head.weight, getattr(head, "bias", None))


def _compare(found: Tensor, expected: Tensor, complaint: str) -> None:
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    if not error <= PROBE_TOLERANCE[expected.dtype]:
        raise TreepackError(f"{complaint} (relative difference {error:.1e}); {_ONLY}")
