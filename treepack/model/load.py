"""A causal language model of transformers, made ready to train on packed rows, or refused in one sentence.

    config.json | directory | hub name --load_model--> LoadedModel
    LoadedModel, Batch --placed--> Batch on the device with the schedule of its attention
    LoadedModel, Batch --hidden_states--> [T, D] --row_loss--> scalar

Tree attention gives exact gradients only if attention is all that mixes tokens and it is plain softmax attention over
the visible pairs. `check_config` refuses by name what is known to break that; `probe.probe` catches what nobody has
named. Data that does not suit the model is refused by `check_fits`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from treepack.attention import IMPLEMENTATIONS, register, resolve, takes_chains
from treepack.errors import TreepackError
from treepack.model.probe import ONLY, probe, refusing

T = TypeVar("T")

_SOFTMAX_LAYERS = ("full_attention", "sliding_attention", "attention")


@dataclass(frozen=True)
class LoadedModel:
    """A model that passed every check of its own.

    `model` is in eval mode; `attention` is the implementation that runs, never "auto"; `notes` are remarks for the
    user; `varlen` says whether rows in which nothing branches go to varlen FlashAttention; `device` is where it
    computes. Of a model whose weights are sharded over ranks, `root` is what gathers them (`sharding`).
    """

    model: Any
    source: str
    attention: str
    notes: tuple[str, ...]
    varlen: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    root: Any = None

    def compute(self, function: Callable[[], T]) -> T:
        """`function()`, which runs the model, while the weights it needs are whole.

        Gradients flow through the tensors that it returns, alone or in tuples, lists and dicts.
        """
        found: T = function() if self.root is None else self.root(function)
        return found


def load_model(
    source: str | Path,
    *,
    attention: str = "auto",
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> LoadedModel:
    """Load a causal language model with tree attention.

    Args:
        source: a model directory, a hub name, or a config file ending in .json, which gets random weights.
        attention: an implementation of `attention.dispatch`, or "auto".
        dtype: dtype of the weights.
        autocast: dtype of the autocast that the model will run under, None for none.
        device: where the model goes.
        seed: seed of random weights.

    Raises:
        TreepackError: if the model cannot be loaded or cannot be trained exactly, or the attention cannot run it; the
            message says why.
    """
    config, notes = read_config(source, attention)
    with loading(source), without_bars():
        model = build_model(source, config, dtype, seed)
    loaded = LoadedModel(model.to(device).eval(), str(source), "reference", notes, device=torch.device(device))
    return with_attention(loaded, attention, autocast or dtype)


def with_attention(loaded: LoadedModel, attention: str, computed: torch.dtype) -> LoadedModel:
    """The model set to `attention`, an implementation or "auto", after proof that it suits tree attention.

    `computed` is the dtype that the model computes in. The model comes with the reference: the probe asks about the
    model, so it runs the implementation that is beyond doubt.

    Raises:
        TreepackError: the model does not suit, or the implementation cannot run it.
    """
    dims = loaded.compute(lambda: probe(loaded.model, source=loaded.source, device=loaded.device))
    chosen = resolve(attention, loaded.device, computed, *sorted(dims))
    loaded.model.set_attn_implementation(IMPLEMENTATIONS[chosen])
    varlen = attention == "auto" and takes_chains(loaded.device, computed, *sorted(dims))
    return replace(loaded, attention=chosen, varlen=varlen)


def loading(source: str | Path) -> AbstractContextManager[None]:
    """Turn what transformers raises about `source` into one sentence."""
    return refusing(
        f"{source}: transformers cannot load it with tree attention", "expected a causal language model that it knows"
    )


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


def read_config(source: str | Path, attention: str = "auto") -> tuple[Any, tuple[str, ...]]:
    """The configuration of a model, with every dropout set to 0, and notes that say so.

    Raises:
        TreepackError: it cannot be read, cannot be trained exactly, or there is no such attention.
    """
    if attention not in IMPLEMENTATIONS:
        raise TreepackError(f"attention is {attention!r}; expected one of {', '.join(IMPLEMENTATIONS)}")
    register()
    config = _parse_config(source)
    check_config(config, source=str(source))
    return config, _without_dropout(config)


def _parse_config(source: str | Path) -> Any:
    from transformers import AutoConfig

    with loading(source):
        if not str(source).endswith(".json"):
            return AutoConfig.from_pretrained(str(source)).get_text_config()
        fields = json.loads(Path(source).read_text(encoding="utf-8"))
        if not (isinstance(fields, dict) and isinstance(fields.get("model_type"), str)):
            raise TreepackError(f"{source}: holds no model_type; expected the config.json of a causal language model")
        return AutoConfig.for_model(fields.pop("model_type"), **fields).get_text_config()


def build_model(source: str | Path, config: Any, dtype: torch.dtype, seed: int) -> Any:
    """The model on the CPU under the reference, with the weights at `source` or, for a config file, random ones.

    Raises:
        TreepackError: weights are missing or of another shape.
    """
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"attn_implementation": IMPLEMENTATIONS["reference"], "dtype": dtype}
    if dtype == torch.float64:
        options["experts_implementation"] = "eager"  # the grouped product of experts has no float64
    if str(source).endswith(".json"):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(config, **options)
    model, report = AutoModelForCausalLM.from_pretrained(
        str(source), config=config, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    # transformers draws what is missing at random; tied weights are not missing.
    for problem in ("missing", "mismatched"):
        names = sorted(key if isinstance(key, str) else key[0] for key in report[f"{problem}_keys"])
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise TreepackError(
                f"{source}: {names[0]}{more} {'is' if len(names) == 1 else 'are'} {problem} in its weights; "
                f"expected a whole checkpoint of {type(model).__name__}"
            )
    return model


def _without_dropout(config: Any) -> tuple[str, ...]:
    """Set every dropout of `config` to 0 and say so: a shared token has one hidden state for all its branches."""
    names = [
        name
        for name, value in sorted(vars(config).items())
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and value > 0
        and ("drop" in name or "jitter" in name)
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
            raise TreepackError(f"{source}: layer {layer} is {kind!r}; {ONLY}")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None) is not None:
            raise TreepackError(f"{source}: {name} is {getattr(config, name)}; {ONLY}, with logits left as they are")
