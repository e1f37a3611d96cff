"""Load a causal language model of transformers with tree attention, and refuse it if it cannot be trained exactly.

    config.json | directory | hub name --read_config--> config, without dropout
                                       --build_model--> model with weights, under the reference attention
                                       --put_adapter--> the same, or a PeftModel around it (`adapter`)
                                       --put_value_head--> the same, with a value head (`value_head`)
                                       --with_attention--> LoadedModel, probed, under the chosen attention

    load_model = all five                 (train.sharding calls them one by one)

Tree attention gives exact gradients only if nothing but attention mixes tokens, and if attention is plain softmax
attention over the visible pairs. Two checks refuse all other models: `compatibility.check_config` by name, before any
weight is read, and `probe.probe` by a small forward pass. The forward passes of training are in `model.forward`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treepack.attention import IMPLEMENTATIONS, register, resolve, takes_chains
from treepack.errors import TreepackError
from treepack.files.model_source import local_source
from treepack.files.remote.hub import is_offline, load_fault, refuse_missing
from treepack.model.accept.compatibility import check_config
from treepack.model.accept.first_batch import mark_checked
from treepack.model.accept.probe import probe
from treepack.model.accept.vocabulary import find_config
from treepack.model.adapters.adapter import assign, base_of, put_adapter
from treepack.model.adapters.four_bits import quantization
from treepack.model.adapters.lora_options import LoraOptions
from treepack.model.dropout import disable_dropout
from treepack.model.experts.interface import implementation_of
from treepack.model.foreign_errors import translate_errors
from treepack.model.head.value_head import add_value_head, named_weights
from treepack.model.loaded import LoadedModel
from treepack.model.stored_weights import (
    check_stored,
    prepare_products,
    stored_arguments,
    stored_kind,
    whole_model,
)
from treepack.model.text_half import check_type, choose_config, is_text_half, model_class, model_from_config
from treepack.model.weights.files import weight_files
from treepack.model.weights.reading import fill, find_plan
from treepack.model.weights.whole_checkpoint import check_savable
from treepack.recurrent.dispatch import use_implementation

_log = logging.getLogger("treepack")
_CPU = torch.device("cpu")
# Settings that other trainers leave in config.json; they change the form of outputs, and no number.
_PLAIN_OUTPUTS = {
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_router_logits", "torchscript"), False),
    "return_dict": True,
}


def load_model(
    source: str | Path,
    *,
    attention: str = "auto",
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    lora: LoraOptions | None = None,
    value_head: bool = False,
    random_head: bool = False,
    dequantize: bool = False,
) -> LoadedModel:
    """Load a causal language model with tree attention.

    Args:
        source: a model directory or its address, a hub name, or a config file ending in .json, which gets random
            weights. The directory of an adapter of PEFT gives its base model with the adapter on it.
        attention: an implementation of `attention.dispatch`, or "auto".
        dtype: dtype of the weights.
        autocast: dtype of the autocast under which the model will run, or None.
        device: device of the weights.
        seed: seed of random weights.
        lora: a new adapter, and the precision of its base; None for no new adapter over a base as it is.
        value_head: put a value head on the model: the one that was saved with it, or else one that gives 0.
        random_head: a new value head has random weights, so that gradients of a value loss reach the model.
        dequantize: read weights that are stored quantised as whole weights.

    Raises:
        TreepackError: if the model cannot be loaded or cannot be trained exactly, or if the attention cannot run it;
            the message gives the reason.
    """
    device = torch.device(device)
    base, adapter = base_of(source, lora)
    rounds = lora is not None and lora.quantize is not None
    config, notes = read_config(base, attention, quantize=rounds, dequantize=dequantize)
    quantized = quantization(base, autocast or dtype, device) if rounds else {}
    _log.info("loading the weights of %s", base)
    with translate_load_errors(base), hide_progress_bars():
        model = build_model(base, config, dtype, seed, device, dequantize=dequantize, **quantized)
    if autocast is not None:
        prepare_products(model, autocast)
    if not quantized:  # bitsandbytes puts its weights on the device when it rounds them
        model.to(device)
    model, weights, more = put_adapter(model, adapter, lora, source=str(source), seed=seed)
    if value_head:
        weights |= put_value_head(model, (str(source), base), random=seed if random_head else None)
    assign(model, weights, torch.promote_types(dtype, torch.float32))  # float32 over a base of bf16 too
    loaded = LoadedModel(model.eval(), str(source), "reference", (*notes, *more), device=device)
    return with_attention(loaded, attention, autocast or dtype)


def put_value_head(model: Any, sources: tuple[str, ...], *, random: int | None = None) -> dict[str, Tensor]:
    """Put a value head on the causal model in `model`; return its first weights by the names of `model`'s parameters.

    `sources` and `random` are as in `value_head.add_value_head`.

    Raises:
        TreepackError: a saved head does not fit the model.
    """
    causal = LoadedModel(model, sources[0], "reference", ()).causal
    return named_weights(model, causal, add_value_head(causal, sources, random=random))


def load_merged(base: str, adapter: str | Path, *, seed: int) -> Any:
    """Return the whole model of a base and the adapter in a directory, W + scale * B A in float32 on the CPU.

    W are whole weights even if the base stores them quantised: rounding the sum again would lose the adapter.

    `seed` is that of random weights, if the base is a config file.

    Raises:
        TreepackError: the base cannot be loaded.
    """
    from peft import PeftModel

    config, _ = read_config(base, dequantize=True)
    with translate_load_errors(base), hide_progress_bars():
        model = build_model(base, config, torch.float32, seed, dequantize=True)
        return PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()


def with_attention(loaded: LoadedModel, attention: str, compute_dtype: torch.dtype) -> LoadedModel:
    """Probe the model and switch it to `attention`; return it with its implementation filled in.

    Args:
        loaded: a model under the reference attention. The probe tests the model, not the kernels of attention and of
            recurrent layers, so it runs the slow implementations whose results are not in doubt.
        attention: an implementation, or "auto".
        compute_dtype: dtype in which the model computes: that of autocast, or else of the weights.

    Raises:
        TreepackError: if the model cannot be trained exactly, or the implementation cannot run it.
    """
    _log.info("probing the model with a small tree")
    with use_implementation("torch"):
        kinds = loaded.compute(lambda: probe(loaded.causal, source=loaded.source, device=loaded.device))
    mark_checked(loaded.causal)
    # (query and key, value) head dimensions over all layers; more than one pair if layers differ.
    dims = sorted({kind.head_dims for kind in kinds})
    is_plain = all(kind.is_plain for kind in kinds)
    chosen = resolve(attention, loaded.device, compute_dtype, *dims, plain=is_plain)
    loaded.causal.set_attn_implementation(IMPLEMENTATIONS[chosen])
    # Only "auto" may choose per row: a named implementation runs every row, so that a user can compare implementations.
    varlen = attention == "auto" and takes_chains(loaded.device, compute_dtype, *dims)
    return replace(loaded, attention=chosen, varlen=varlen, kinds=kinds)


def translate_load_errors(source: str | Path) -> AbstractContextManager[None]:
    """Turn exceptions that transformers raises while it loads `source` into one sentence.

    Raises:
        TreepackError: instead of any exception.
    """
    return translate_errors(
        f"{source}: transformers cannot load it with tree attention",
        "expected a causal language model that this version of transformers supports",
    )


@contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Disable the progress bars of transformers: they would write to stderr, which the command line uses itself."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def read_config(
    source: str | Path, attention: str = "auto", *, quantize: bool = False, dequantize: bool = False
) -> tuple[Any, tuple[str, ...]]:
    """Read the configuration of a model, set every dropout to 0, and return it with a note on each change.

    Settings of additional outputs are switched off. The saved copy keeps the fields of the source.

    For a vision-language model this is the whole configuration; dropout and the checks concern its text half.
    With `quantize` the weights are to be rounded to 4 bits, and `dequantize` is as in `load_model`.

    Raises:
        TreepackError: if the configuration cannot be read, the model cannot be trained exactly, or `attention` is
            unknown.
    """
    if attention not in IMPLEMENTATIONS:
        raise TreepackError(f"attention is {attention!r}; expected one of {', '.join(IMPLEMENTATIONS)}")
    register()
    whole = _parse_config(source)
    check_stored(str(source), whole, quantize=quantize, dequantize=dequantize)
    config, notes = choose_config(whole, source)
    text = config.get_text_config()
    for part in (config, text):
        for name, value in _PLAIN_OUTPUTS.items():
            if getattr(part, name, value) != value:
                setattr(part, name, value)
    check_config(text, source=str(source))
    check_type(config, source)
    return config, (*notes, *disable_dropout(text))


def _parse_config(source: str | Path) -> Any:
    from transformers import AutoConfig

    with translate_load_errors(source):
        local = local_source(source)
        if local.endswith(".json"):
            # from_pretrained reads directories and no files: for_model builds the class that `model_type` names.
            fields = dict(find_config(local) or {})
            return AutoConfig.for_model(fields.pop("model_type"), **fields)
        refuse_missing(local, kind="model", files=("config.json",))
        try:
            return AutoConfig.from_pretrained(local, local_files_only=is_offline(local))
        except OSError as error:  # about files; other exceptions are about their content
            raise load_fault(local, error, kind="model") from error


def build_model(
    source: str | Path,
    config: Any,
    dtype: torch.dtype,
    seed: int,
    device: torch.device = _CPU,
    *,
    dequantize: bool = False,
    **quantized: Any,
) -> Any:
    """Build the model under the reference attention.

    Its weights come from `source`; if `source` is a config file, they are random. `quantized` are the options of
    `four_bits.quantization`, and `dequantize` is as in `load_model`. Of a vision-language model, only the text half is
    built (`text_half`). The weights are read to `device` if they can be read tensor by tensor, else to the CPU.

    Raises:
        TreepackError: if weights are missing or have another shape.
    """
    options = _options(dtype)
    local = local_source(source)
    if local.endswith(".json"):
        # Weights are made on the CPU, so only its generator is seeded, and restored afterwards.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return _cast_routers(model_from_config(config, **options), dtype)
    stored = stored_kind(config) is not None
    if stored:
        quantized = stored_arguments(config, device, dequantize=dequantize)
    model = None if quantized else _read_in_parts(source, config, dtype, device)
    if model is not None:
        return _cast_routers(model, dtype)
    model, report = model_class(config).from_pretrained(
        local,
        config=config,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        local_files_only=is_offline(local),
        **options,
        **quantized,
    )
    # transformers only warns about missing weights and draws them at random. It does not list tied weights as missing.
    for problem in ("missing", "mismatched"):
        # "missing" holds names, "mismatched" holds (name, shape in the file, shape in the model)
        names = sorted(key if isinstance(key, str) else key[0] for key in report[f"{problem}_keys"])
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise TreepackError(
                f"{source}: {names[0]}{more} {'is' if len(names) == 1 else 'are'} {problem} in its weights; "
                f"expected a whole checkpoint of {type(model).__name__}"
            )
    if stored:
        _cast_read_weights(model, dtype)
    if stored and dequantize:
        model = whole_model(model, dtype)
    elif is_text_half(model) and not stored:  # only an adapter over stored weights is trained and saved
        check_savable(model, source)
    prepare_products(model, dtype)
    return _cast_routers(model, dtype)


def build_empty(source: str | Path, config: Any, dtype: torch.dtype) -> Any:
    """Return the model on the meta device, without memory for its weights, with its generation settings."""
    from transformers import GenerationConfig

    with torch.device("meta"):
        model = model_from_config(config, **_options(dtype))
    local = local_source(source)
    model.config.name_or_path = local  # as `from_pretrained` does
    with suppress(OSError):  # the source has no generation_config.json
        model.generation_config = GenerationConfig.from_pretrained(local, local_files_only=is_offline(local))
    return model


def _options(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "attn_implementation": IMPLEMENTATIONS["reference"],
        "dtype": dtype,
        "experts_implementation": implementation_of(dtype),
    }


def _read_in_parts(source: str | Path, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the model with its weights on `device`, or None if only transformers can convert them.

    `from_pretrained` holds the tensors of the files and the tensors made of them at once, on the CPU.

    Raises:
        TreepackError: if a file cannot be read, or a weight has another shape.
    """
    # In 16 bits transformers keeps some modules in float32, which a model without weights does not show.
    files = weight_files(source) if dtype in (torch.float32, torch.float64) else None
    if files is None:
        return None
    model = build_empty(source, config, dtype)
    plan = find_plan(model, files, str(source))
    if plan is None:
        return None
    if is_text_half(model):
        check_savable(model, source)
    fill(model, plan, files, device, str(source))
    return model


def _cast_routers(model: Any, dtype: torch.dtype) -> Any:
    """Cast the weights that transformers keeps in float32 to float64 if `dtype` is float64.

    Routers of ernie4_5_moe and hunyuan_v1_moe are float32 in every dtype, and fail beside float64 weights. Buffers stay
    as they are: some versions of transformers multiply the frequencies of rotary positions by float32 positions.
    """
    if dtype == torch.float64:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    return model


def _cast_read_weights(model: Any, dtype: Any) -> None:
    """Turn weights that were dequantised to bfloat16 while they were read, as transformers 5.10 does, into `dtype`."""
    for parameter in model.parameters():
        if parameter.dtype is torch.bfloat16:
            parameter.data = parameter.data.to(dtype)
