"""LoRA adapters over a causal language model, in the format of PEFT.

    --model DIR --find_adapter--> LocalAdapter(directory, base), None if DIR is a whole model
    causal, LoraOptions --new_adapter--> PeftModel, initial weights        B is zero, so the model is unchanged
    causal, Adapter --read_adapter--> PeftModel, its weights               a trained adapter, which may train on
    PeftModel, weights --assign--> the same with these weights             train.sharding gives each rank its rows
    PeftModel --save_adapter--> adapter_model.safetensors, adapter_config.json
    PeftModel --check_adapter--> an error if PEFT would not save all of it      before the first step

A LoRA adapter adds scale * B A x to the result W x of a linear layer or an expert, token by token. So it is exact under
tree attention, as long as it has no dropout (`dropout`). All weights of the model itself stay frozen.
"""

from __future__ import annotations

import json
import re
import tempfile
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from treepack.errors import TreepackError
from treepack.files.model_source import base_beside, local_source
from treepack.files.remote.hub import is_offline
from treepack.model.adapters.adapter_targets import conv1d_class, find_targets
from treepack.model.adapters.lora_options import LoraOptions, require_packages
from treepack.model.experts.lora import follow_adapters
from treepack.model.foreign_errors import translate_errors

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

# Parts of PEFT's LoraConfig that change more than products of tokens with weights, or the base itself.
_REFUSED_PARTS = (
    "layer_replication alora_invocation_tokens arrow_config trainable_token_indices "
    "use_qalora use_bdlora megatron_config monteclora_config velora_config kasa_config lora_bias bias"
).split()
_PLAIN_INITS = (True, False, "gaussian", "orthogonal", "eva")  # the others subtract the first adapter from the base


@dataclass(frozen=True)
class LocalAdapter:
    """An adapter on this machine: its directory, and the name of its base model."""

    directory: str
    base: str


def find_adapter(source: str | Path) -> LocalAdapter | None:
    """Return the adapter in the directory, at the address or under the hub name `source`, or None.

    Raises:
        TreepackError: its configuration is damaged or names no base model, or the store fails.
    """
    if str(source).endswith(".json"):
        return None
    local = local_source(source)
    file: Path | None = Path(local, CONFIG_FILE)
    if not Path(local).is_dir():
        file = _hub_file(local)
    if file is None or not file.is_file():
        return None
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        base = fields.get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise TreepackError(f"{source}: its {CONFIG_FILE} cannot be read ({error}); save the adapter again") from error
    if not base:
        raise TreepackError(f"{source}: its {CONFIG_FILE} names no base model; set base_model_name_or_path in it")
    return LocalAdapter(str(file.parent), base_beside(file.parent, str(base)))


def _hub_file(name: str) -> Path | None:
    from transformers.utils import cached_file

    options = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_gated_repo": False}
    with suppress(Exception):  # a name that cannot be read gets its error from the configuration, which is read next
        path = cached_file(name, CONFIG_FILE, local_files_only=is_offline(name), **options)
        return None if path is None else Path(path)
    return None


def base_of(source: str | Path, options: LoraOptions | None) -> tuple[str, LocalAdapter | None]:
    """Return the name of the whole model of `source`, and the adapter in it, None if it is a whole model.

    Raises:
        TreepackError: `options` ask for a new adapter and there is one already, or its configuration is damaged.
    """
    adapter = find_adapter(source)
    if adapter is None:
        return str(source), None
    if options is not None and options.rank is not None:
        raise TreepackError(f"{source}: contains an adapter, which training continues; leave out lora_rank")
    return adapter.base, adapter


def put_adapter(
    causal: Any, adapter: LocalAdapter | None, options: LoraOptions | None, *, source: str, seed: int
) -> tuple[Any, dict[str, Tensor], tuple[str, ...]]:
    """Put the saved `adapter`, or a new one, on `causal`; return the model, the adapter's weights, and notes.

    Without an adapter and without a rank for a new one, the model is `causal`, and there are no weights.

    Raises:
        TreepackError: as `_new_adapter` and `_read_adapter`.
    """
    if adapter is None and (options is None or options.rank is None):
        return causal, {}, ()
    with warnings.catch_warnings():
        # PEFT asks models for a flag that transformers has renamed, which users can do nothing about.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        if adapter is not None:
            model, weights, notes = _read_adapter(causal, adapter, source=source)
        else:
            assert options is not None
            (model, weights), notes = _new_adapter(causal, options, source=source, seed=seed), ()
    follow_adapters(model)
    return model, weights, notes


def _new_adapter(causal: Any, options: LoraOptions, *, source: str, seed: int) -> tuple[Any, dict[str, Tensor]]:
    """Put an adapter on linear layers and experts of `causal`; return the PeftModel and the adapter's initial weights.

    Args:
        causal: the base, which is changed in place and frozen.
        options: `rank` is not None.
        source: the base's name, for messages and for adapter_config.json.
        seed: of A, which does not depend on the dtype or the number of ranks. B is zero.

    Raises:
        TreepackError: PEFT is not installed, or no linear layer has a name of `options.targets`.
    """
    require_packages(quantize=False)
    from peft import LoraConfig, get_peft_model

    targets = find_targets(causal, options.targets, source)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=options.rank,
        lora_alpha=options.scale_alpha,
        target_modules=targets.modules,
        target_parameters=targets.parameters or None,
        fan_in_fan_out=any(isinstance(module, conv1d_class()) for module in causal.modules()),
    )
    with translate_errors(f"{source}: PEFT cannot put an adapter on it", "choose other lora_targets"):
        model = get_peft_model(causal, config)
    if added := set(config.target_parameters or ()) - set(targets.parameters):
        names = ", ".join(sorted(added))
        raise TreepackError(f"{source}: PEFT puts adapters of {options.targets} on experts ({names}); leave these out")
    # PEFT writes the folder of the base: if the base is an address, the folder of its copy in the cache.
    config.base_model_name_or_path = str(Path(source).resolve()) if Path(source).exists() else source
    return model, initial_weights(model, seed)


def initial_weights(model: nn.Module, seed: int, *, random_b: bool = False) -> dict[str, Tensor]:
    """Return the first weights of a LoRA adapter by parameter, float32 on the CPU: A uniform, B zero.

    With `random_b`, B is uniform too. The gradient of A is 0 as long as B is 0, so a comparison of gradients needs it.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in model.named_parameters():
        if ".lora_A." in name or (random_b and ".lora_B." in name):
            # U(-1 / sqrt(in), 1 / sqrt(in)) as in PEFT, which calls it kaiming_uniform_ with a = sqrt(5)
            bound = parameter.shape[1] ** -0.5
            weights[name] = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
        elif ".lora_B." in name:
            weights[name] = torch.zeros(parameter.shape)
    return weights


def _read_adapter(causal: Any, adapter: LocalAdapter, *, source: str) -> tuple[Any, dict[str, Tensor], tuple[str, ...]]:
    """Put a saved adapter on `causal`; return the PeftModel, the adapter's weights by parameter, and notes.

    Raises:
        TreepackError: PEFT is not installed, the kind of the adapter is not supported, or its files are damaged.
    """
    require_packages(quantize=False)
    from peft import PeftConfig, get_peft_model
    from peft.utils import load_peft_weights

    with translate_errors(f"{source}: PEFT cannot read its adapter", "save the adapter again"):
        config = PeftConfig.from_pretrained(adapter.directory)
        _check_kind(config, source)
        notes: tuple[str, ...] = ()
        if config.lora_dropout:
            config.lora_dropout = 0.0
            notes = ("lora_dropout set to 0: a token shared by branches has one hidden state for all of them",)
        config.inference_mode, config.base_model_name_or_path = False, None
        model = get_peft_model(causal, config)
        config.base_model_name_or_path = adapter.base
        saved = load_peft_weights(adapter.directory, device="cpu")
    names = _stored_names(model)
    differing = sorted(names.keys() ^ saved.keys())
    if differing:
        lacking = "model" if differing[0] in saved else "adapter"
        raise TreepackError(f"{source}: the {lacking} has no {differing[0]}; use the adapter with its own base model")
    parameters = dict(model.named_parameters())
    for stored, name in names.items():
        if saved[stored].shape != parameters[name].shape:
            raise TreepackError(
                f"{source}: {stored} has the shape {list(saved[stored].shape)} in the adapter and "
                f"{list(parameters[name].shape)} in the model; use the adapter with its own base model"
            )
    return model, {name: saved[stored] for stored, name in names.items()}, notes


def _check_kind(config: Any, source: str) -> None:
    """Refuse adapters that are not LoRA of linear layers and experts."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise TreepackError(f"{source}: is an adapter of the kind {kind}; expected LORA")
    used = next((name for name in _REFUSED_PARTS if getattr(config, name, None) not in (None, False, "none")), None)
    if used is not None:
        raise TreepackError(f"{source}: its adapter uses {used}, which treepack does not support; train another one")
    if config.init_lora_weights not in _PLAIN_INITS:
        raise TreepackError(
            f"{source}: its adapter starts with {config.init_lora_weights!r}, which changes the base model; convert "
            "it to a plain LoRA adapter with PEFT"
        )


def _stored_names(model: Any) -> dict[str, str]:
    """Return the parameter's name for every name in the adapter's file.

    base_model.model.model.layers.0.mlp.up_proj.lora_A.weight -> the same with lora_A.default.weight
    """
    from peft import get_peft_model_state_dict

    tensors = model.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in tensors.items()}
    stored = get_peft_model_state_dict(model, state_dict=dict(tensors), save_embedding_layers=False)
    return {name: names[id(tensor)] for name, tensor in stored.items()}


def check_trainable(source: str | Path, options: LoraOptions) -> None:
    """Refuse options of a training run, before its model is loaded.

    Raises:
        TreepackError: a package is missing, or there is nothing to train.
    """
    require_packages(quantize=options.quantize is not None)
    _, adapter = base_of(source, options)
    if adapter is None and options.rank is None:
        raise TreepackError(f"{source}: contains no adapter to train; give lora_rank for a new one")


def is_adapted(model: Any) -> bool:
    """Return True for a PeftModel, of which only the adapter is trained and saved."""
    return hasattr(model, "peft_config")


def assign(model: nn.Module, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Copy whole weights into the parameters of an adapter, on their device, in `dtype`."""
    for name, parameter in model.named_parameters():
        if name in weights:
            parameter.data = weights[name].to(parameter.device, dtype)


def base_name(name: str) -> str:
    """Return the name of a frozen parameter in the base model's own files.

    "model.layers.0.mlp.up_proj.base_layer.weight" -> "model.layers.0.mlp.up_proj.weight"
    """
    # Experts with two adapters have two wrappers: experts.base_layer.base_layer.down_proj
    return re.sub(r"(\.base_layer)+\.", ".", name).replace(".original_module.", ".")


def adapter_base(model: Any) -> str:
    """Return the name of the base of a PeftModel, as `save_adapter` writes it."""
    return str(model.peft_config["default"].base_model_name_or_path)


def save_adapter(model: Any, directory: Path, weights: dict[str, Any] | None) -> None:
    """Write the adapter of a PeftModel in PEFT's own format; `weights` are whole tensors of a sharded model."""
    model.save_pretrained(directory, save_embedding_layers=False, state_dict=weights)
    (directory / "README.md").unlink(missing_ok=True)  # PEFT's empty form of a model card


def check_adapter(model: Any, source: str) -> None:
    """Write the files of an adapter, with one number for each weight, and read them again.

    Raises:
        TreepackError: PEFT cannot write or read them, or leaves out a trained weight.
    """
    from peft import PeftConfig
    from peft.utils import load_peft_weights

    numbers = {name: torch.zeros(1) for name in model.state_dict(keep_vars=True)}
    trained = sum(parameter.requires_grad for parameter in model.parameters())
    complaint = f"{source}: PEFT cannot save its adapter"
    with tempfile.TemporaryDirectory() as folder, translate_errors(complaint, "install another version of peft"):
        save_adapter(model, Path(folder), numbers)
        _check_kind(PeftConfig.from_pretrained(folder), source)
        count = len(load_peft_weights(folder, device="cpu"))
    if count != trained:
        raise TreepackError(f"{complaint}: it writes {count} of {trained} weights; choose other lora_targets")
