"""The text half of a vision-language model: its language model and output layer, without the vision tower.

    Qwen2_5_VLForConditionalGeneration              the same class, of the same model type
      model                                           model
        visual           (vision tower)     -->         visual = None
        language_model   (decoder)                      language_model
      lm_head                                         lm_head

    config --choose_config---> the whole configuration, or that of the text half alone if no weights are loaded
           --model_class-----> AutoModelForCausalLM, or a class of transformers whose models have no towers

The model's own code computes the logits, so scales and caps fit its type. Its parameters have the names of the
whole model: the weights of the towers in a checkpoint are not read, and an adapter fits the whole model. For text the
three rows of rotary positions (time, height, width) are equal, which is plain rotary embedding of positions [1, T].
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from treepack.errors import TreepackError

_MARK = "_treepack_text_half"
# Types whose code needs its towers for text too. Their text half is a causal language model of transformers.
_NEEDS_TOWERS = frozenset({"gemma3n"})


def choose_config(config: Any, source: str | Path) -> tuple[Any, tuple[str, ...]]:
    """Return the configuration of the model that is built for `config`, which `source` contains, and notes.

    The result describes the text half alone if the whole model cannot compute text without its towers, or if `source`
    is a config file: a model with random weights has no other tensors to save.
    """
    text = config.get_text_config()
    if not _is_vision_language(config):
        return text, ()
    if not str(source).endswith(".json") and config.model_type not in _NEEDS_TOWERS:
        return config, (
            f"only the text half of this {config.model_type} is loaded: images and videos are not computed, and a "
            "saved model has the rest of the checkpoint unchanged",
        )
    note = f"only the text half of {config.model_type} is built: a saved model has no vision tower"
    return (text if _is_causal(text) else config), (note,)


def check_type(config: Any, source: str | Path) -> None:
    """Refuse a configuration for which transformers has no language model.

    Raises:
        TreepackError: naming the type.
    """
    if not _is_vision_language(config) and not _is_causal(config):
        raise TreepackError(
            f"{source}: transformers has no causal language model of the type {config.model_type!r}; give a language "
            "model, or a vision-language model that transformers can load"
        )


def _is_vision_language(config: Any) -> bool:
    """Return True if a configuration of transformers describes a text model together with vision or audio towers."""
    return config.get_text_config() is not config and _whole_class(config) is not None


def is_text_half(model: Any) -> bool:
    """Return True if `model` is the text half of a vision-language model: saving it must add all other tensors."""
    return getattr(type(model), _MARK, False)


def check_text(model: Any, input_ids: Tensor, source: str) -> None:
    """Refuse a row with images, videos or sounds if `model` is a text half: their features are not computed.

    Args:
        model: a model of transformers.
        input_ids: the row's token ids [T].
        source: the model's name in the error.

    Raises:
        TreepackError: naming the token id.
    """
    if not is_text_half(model):
        return
    names = [f"{kind}_token_{suffix}" for kind in ("image", "video", "audio") for suffix in ("id", "index")]
    ids = {value: name for name in names if isinstance(value := getattr(model.config, name, None), int)}
    rest = input_ids[torch.isin(input_ids, torch.tensor(sorted(ids), dtype=input_ids.dtype, device=input_ids.device))]
    if len(rest):
        token = int(rest[0])
        raise TreepackError(
            f"{source}: the data has the token id {token}, which is {ids[token]} of {model.config.model_type}, but "
            "only the text half is trained; leave out trajectories with images, videos or sounds"
        )


def model_class(config: Any) -> Any:
    """Return a class with `from_pretrained` for models of `config`; see the module's picture.

    Raises:
        TreepackError: when the class builds a model without a decoder or output layer.
    """
    from transformers import AutoModelForCausalLM

    return _text_half_of(_whole_class(config)) if _is_vision_language(config) else AutoModelForCausalLM


def model_from_config(config: Any, **options: Any) -> Any:
    """Return a model of `config` with random weights; `options` are passed to `AutoModelForCausalLM.from_config`."""
    build = model_class(config)
    return (
        build._from_config(config, **options) if _is_vision_language(config) else build.from_config(config, **options)
    )


def _is_causal(config: Any) -> bool:
    from transformers import AutoModelForCausalLM

    return type(config) in AutoModelForCausalLM._model_mapping


def _whole_class(config: Any) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    # The mapping is lazy: `get` imports the module of the model.
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)


@functools.cache
def _text_half_of(whole: Any) -> Any:
    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        whole.__init__(self, config, *args, **kwargs)
        _drop_towers(self)

    def set_attention(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        # transformers warns about every configuration without a module, such as the configurations of towers.
        if isinstance(attn_implementation, str):
            text = [name for name in self.config.sub_configs if name == "text_config"]
            attn_implementation = dict.fromkeys(["", *text], attn_implementation)
        whole.set_attn_implementation(self, attn_implementation, *args, **kwargs)

    def set_mode(self: Any, mode: bool = True) -> Any:
        whole.train(self, mode)
        # In training mode some models refuse text without a map of its images. No module above the decoder depends on
        # the mode otherwise.
        for module in self.modules():
            if module is not self and module is not self.get_decoder() and self.get_decoder() in module.modules():
                module.training = False
        return self

    # The name of the class is that of the whole one: transformers looks up conversions of weights by it, and writes it
    # into config.json.
    members = {"__init__": build, "set_attn_implementation": set_attention, "train": set_mode}
    return type(whole.__name__, (whole,), {**members, "__module__": whole.__module__, _MARK: True})


def _drop_towers(model: Any) -> None:
    """Replace modules by None unless they are in the decoder or output layer, or contain one of the two.

    Raises:
        TreepackError: there is no decoder or no output layer.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    parts = (decoder, head, model.get_input_embeddings())
    if None in parts or decoder is model or model.config.is_encoder_decoder:
        raise TreepackError(
            f"{model.config.name_or_path}: {model.config.model_type} has no text half with embeddings, a decoder and "
            "an output layer; give a language model"
        )
    kept = {id(module) for part in (decoder, head) for module in part.modules()}
    dropped = [f"^{name}\\." for name in _drop(model, kept)]
    # No warning for each weight of a tower. A list in older versions of transformers, a set in newer ones.
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None)
    ignored = [] if ignored is None else ignored
    model._keys_to_ignore_on_load_unexpected = type(ignored)([*ignored, *dropped])


def _drop(module: nn.Module, kept: set[int], prefix: str = "") -> list[str]:
    """Drop the children of `module` that contain no module of `kept`; return their names."""
    dropped = []
    for name, child in list(module.named_children()):
        if id(child) in kept:
            continue
        if any(id(each) in kept for each in child.modules()):
            dropped += _drop(child, kept, f"{prefix}{name}.")
        else:
            setattr(module, name, None)
            dropped.append(prefix + name)
    return dropped
