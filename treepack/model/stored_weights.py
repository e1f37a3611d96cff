"""Models whose weights are stored quantised: refuse uses that would be wrong, and read the weights. Imports no torch.

    fields of config.json --stored_kind-------> "fp8" | "bitsandbytes, 4 bits" | ... | None
    the same, its use     --check_stored------> refusal        full training would leave quantised weights as they are
    config, device        --stored_arguments--> arguments of from_pretrained
    model in memory       --whole_model-------> the same with ordinary layers
                          --check_types-------> refusal, by the types of its weights
                          --prepare_products--> its layers of 4 bits compute as the gradients of an adapter need it

A quantised weight is frozen. The gradient reaches the weights before it only if its layer has a backward pass, which
`verify.slope` measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treepack.errors import TreepackError

# Fields of config.json about quantised weights.
QUANTIZATION_FIELDS = ("quantization_config", "compression_config")
# Kinds that transformers can read as whole weights.
_READABLE = frozenset({"fp8", "mxfp4", "bitsandbytes, 4 bits", "bitsandbytes, 8 bits"})
# Kinds that become whole weights while they are read. On a CPU they must, because their kernels are for GPUs.
_WHILE_READING = ("fp8", "mxfp4")


def stored_kind(config: Any) -> str | None:
    """Return how the weights of a model are stored; None for whole weights.

    `config` contains the fields of config.json, or is a configuration of transformers. Those of a model with towers may
    be in its text half.
    """
    fields = _fields(config)
    stored = next(filter(None, (fields.get(name) for name in QUANTIZATION_FIELDS)), None)
    if stored is None:
        text = fields.get("text_config")
        return None if text is None else stored_kind(text)
    stored = stored if isinstance(stored, Mapping) else stored.to_dict()
    bits = next((bits for bits in (4, 8) if stored.get(f"load_in_{bits}bit")), None)
    method = stored.get("quant_method") or ("bitsandbytes" if bits else "an unknown method")
    return str(getattr(method, "value", method)) + (f", {bits} bits" if bits else "")


def check_stored(
    source: str,
    config: Any,
    *,
    trained: bool = False,
    on_gpu: bool = False,
    quantize: bool = False,
    merge: bool = False,
    dequantize: bool = False,
) -> None:
    """Refuse stored weights that cannot be used.

    Args:
        source: the model's name, for errors.
        config: as in `stored_kind`.
        trained: all weights are trained, and not an adapter or nothing.
        on_gpu: an adapter is trained over the weights on a GPU.
        quantize: the weights are rounded to 4 bits.
        merge: an adapter is added to the weights.
        dequantize: the weights are read as whole weights.

    Raises:
        TreepackError: naming the reason, and the weights in full precision as the remedy.
    """
    kind = stored_kind(config)
    if kind is None:
        return
    start, remedy = f"{source}: its weights are quantised ({kind})", "give the checkpoint in bf16 of the same model"
    # The saved copy of a model with towers has the quantised tensors of its source.
    readable = kind in _READABLE and "vision_config" not in _fields(config)
    if dequantize and not readable:
        raise TreepackError(f"{start}, and such weights cannot be read as whole ones; {remedy}")
    if quantize:
        raise TreepackError(f"{start} already, and --quantize rounds whole weights; omit --quantize")
    if dequantize:
        return
    if kind == "bitsandbytes, 8 bits":
        raise TreepackError(
            f"{start}, and its layers round the numbers of a token by those of the other tokens of a pass, so a branch "
            f"in a tree differs from the branch alone; {remedy}{', or train with --dequantize' if readable else ''}"
        )
    if on_gpu:
        _refuse_kernels(source, kind)
    if merge:
        raise TreepackError(f"{start}, and rounding the sum with an adapter again would lose the adapter; omit --merge")
    if trained:
        more = ", or read them as whole weights with --dequantize" if readable else ""
        raise TreepackError(
            f"{start}, so full training would leave them as they are; {remedy}, train an adapter with --lora-rank{more}"
        )


def _refuse_kernels(source: str, kind: str) -> None:
    """Refuse an adapter over layers that run in kernels without an exact backward pass.

    Measured on an H200: over fp8 the gradient of an adapter is off by 9 %, and transformers before 5.24 has none.
    """
    faults = {"fp8": "round the numbers of tokens to fp8 too", "mxfp4": "have no backward pass"}
    if kind in faults:
        raise TreepackError(
            f"{source}: its weights are quantised ({kind}), and the kernels of such layers {faults[kind]}, so "
            "gradients would be wrong; read them as whole weights with --dequantize, or give the checkpoint in bf16 of "
            "the same model"
        )


def _fields(config: Any) -> Mapping[str, Any]:
    return config if isinstance(config, Mapping) else vars(config)


def check_types(source: str, model: Any) -> None:
    """Refuse a model of transformers that is trained, without an adapter over layers with weights of one byte or less.

    Raises:
        TreepackError: naming the weight, or the kind of weights if they are below an adapter and have wrong gradients.
    """
    named = list(model.named_parameters())
    if any(".lora_" in name for name, _ in named):
        _refuse_kernels(source, stored_kind(model.config) or "")
        return
    for name, parameter in named:
        if parameter.element_size() == 1 or hasattr(parameter, "quant_state"):
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise TreepackError(
                f"{source}: {name} is stored as {dtype}, so full training would leave it as it is; give the checkpoint "
                "in bf16 of the same model, or train an adapter (LoRA)"
            )


def stored_arguments(config: Any, device: Any, *, dequantize: bool) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for a checkpoint with the configuration `config`, which may change."""
    if stored_kind(config) in _WHILE_READING and (dequantize or device.type == "cpu"):
        for each in (config, config.get_text_config()):
            if (fields := getattr(each, "quantization_config", None)) is not None:
                each.quantization_config = {**fields, "dequantize": True}
    return {"device_map": {"": device}}


def whole_model(model: Any, dtype: Any) -> Any:
    """Return `model` with the weights of its quantised layers in `dtype`, and without a quantization_config."""
    whole = model.dequantize(dtype) if getattr(model, "hf_quantizer", None) is not None else model
    # transformers keeps how the weights were read, and a save undoes it; whole weights are not to be quantised again.
    if (steps := getattr(whole, "_weight_conversions", None)) is not None:
        whole._weight_conversions = [step for step in steps if not _only_dequantizes(step)]
    return whole


def _only_dequantizes(step: Any) -> bool:
    operations = getattr(step, "operations", [])
    return bool(operations) and all(hasattr(operation, "hf_quantizer") for operation in operations)


def prepare_products(model: Any, dtype: Any = None) -> None:
    """Let all layers of 4 bits of bitsandbytes compute in a way that has gradients, and in `dtype` unless it is None.

    A checkpoint may set another dtype for products. On CPUs with AVX512-BF16, bitsandbytes changes the order of the
    weights in the first pass without gradients, and from then on runs a kernel in bfloat16 that has no backward pass.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
            if dtype is not None:
                module.compute_dtype, module.compute_type_is_set = dtype, True
