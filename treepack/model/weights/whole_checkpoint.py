"""Save a trained text half as a whole vision-language checkpoint.

    source: model-00001-of-00002.safetensors                 directory: the same files, tensors and names
      visual.patch_embed.proj.weight        --as it is-->      visual.patch_embed.proj.weight
      model.layers.0.mlp.up_proj.weight     --trained---->     model.layers.0.mlp.up_proj.weight

transformers renames, merges and transposes tensors when it loads them, and can undo this. So the names in memory are
turned into names of the source, one tensor at a time:

    model.language_model.layers.0.mlp.up_proj.weight    -> model.layers.0.mlp.up_proj.weight
    model.language_model.layers.0.mlp.experts.down_proj -> ... .mlp.experts.0.down_proj.weight, ... .mlp.experts.1 ...

Every other tensor of the source is copied bit for bit. One file of the source is in memory at a time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treepack.errors import TreepackError
from treepack.model.text_half import is_text_half
from treepack.model.weights.files import INDEX_FILE, SINGLE_FILE, translate_read_errors, weight_files


def check_savable(model: Any, source: str | Path) -> None:
    """Refuse a text half whose trained weights could not be put into a copy of the checkpoint `source`.

    Call it when the model is loaded, so that no run fails after its training.

    Raises:
        TreepackError: the weights are not safetensors, or transformers cannot restore their names.
    """
    model.tie_weights()  # older versions of transformers leave tied weights apart on the meta device
    _plan(model, source, _files(source))


def has_rest(model: Any, source: str | Path) -> bool:
    """Return True if the checkpoint `source` has more tensors than `model`, its text half; a config file has none."""
    return is_text_half(model) and not str(source).endswith(".json")


def save_whole(
    model: Any,
    source: str | Path,
    directory: Path,
    state: dict[str, Tensor] | None = None,
    *,
    rounded: bool = False,
) -> None:
    """Write the files of the weights of `source` into `directory`, with the weights of its text half from `model`.

    Args:
        model: the text half, as `load.build_model` returns it for `source`.
        source: a model directory or its address, or a hub name.
        directory: created if it does not exist.
        state: the whole tensors of a model whose weights are sharded; None if `model` has them itself.
        rounded: write trained tensors in their dtype in the source, else in that of `state`.

    Raises:
        TreepackError: the checkpoint of the source is missing or was replaced since the model was loaded.
        OSError: the disk fails.
    """
    from safetensors.torch import save_file

    files = _files(source)
    plan = _plan(model, source, files)
    state = model.state_dict() if state is None else state
    directory.mkdir(parents=True, exist_ok=True)
    num_bytes = 0
    for path in sorted(set(files.values())):
        with translate_read_errors(source):
            tensors, metadata = _fill_in(path, plan, model, state, rounded=rounded)
        save_file(tensors, directory / path.name, metadata=metadata)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if not (directory / SINGLE_FILE).exists():
        names = {name: path.name for name, path in sorted(files.items())}
        index = {"metadata": {"total_size": num_bytes}, "weight_map": names}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _fill_in(
    path: Path, plan: dict[str, str], model: Any, state: dict[str, Tensor], *, rounded: bool
) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors of a file of the source, with values from `state` for the text half, and its metadata."""
    from safetensors import safe_open

    tensors: dict[str, Tensor] = {}
    restored: dict[str, dict[str, Tensor]] = {}  # by name in memory: several experts are in one tensor
    addresses: set[int] = set()
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            if name not in plan:
                tensors[name] = file.get_tensor(name)
                continue
            ours = plan[name]
            if ours not in restored:
                value = state[ours].detach().cpu()
                restored[ours] = {ours: value, **_restore(model, ours, value)}
            fitting = _fit(restored[ours][name], file.get_slice(name).get_shape())
            assert fitting is not None, "_plan has checked the shapes"
            tensor = fitting.to(file.get_tensor(name).dtype if rounded else fitting.dtype).contiguous()
            # A checkpoint may contain two tied tensors, but safetensors writes no tensors that share memory.
            tensors[name] = tensor.clone() if tensor.data_ptr() in addresses else tensor
            addresses.add(tensor.data_ptr())
        return tensors, file.metadata()


def _files(source: str | Path) -> dict[str, Path]:
    files = weight_files(source)
    if files is None:
        raise TreepackError(f"{source}: its weights are not safetensors; save the model again with transformers")
    return files


def _plan(model: Any, source: str | Path, files: dict[str, Path]) -> dict[str, str]:
    """Return the name in memory for every tensor of the source that belongs to the text half.

    Raises:
        TreepackError: a tensor in memory has no counterpart in the source.
    """
    shapes = _shapes(source, files)
    groups: dict[int, list[str]] = {}  # tied tensors are one group, of which a checkpoint may contain only one
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        groups.setdefault(id(tensor), []).append(name)
    plan: dict[str, str] = {}
    for names in groups.values():
        stored: dict[str, str] = {}
        for name in names:
            empty = torch.empty(tensors[name].shape, device="meta")
            # A checkpoint may also have the names in memory already, which older versions of transformers do not see.
            for parts in (_restore(model, name, empty), {name: empty}):
                if all(part in shapes and _fit(value, shapes[part]) is not None for part, value in parts.items()):
                    stored |= dict.fromkeys(parts, name)
                    break
        if not stored:
            raise TreepackError(
                f"{source}: {names[0]} has another name or shape in its weight files than transformers can restore, so "
                "a trained model could not be saved; save the model again with this version of transformers"
            )
        plan |= stored
    return plan


def _shapes(source: str | Path, files: dict[str, Path]) -> dict[str, list[int]]:
    from safetensors import safe_open

    shapes = {}
    for path in sorted(set(files.values())):
        with translate_read_errors(source), safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                shapes[name] = file.get_slice(name).get_shape()
    return shapes


def _restore(model: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, by name, from which transformers makes the tensor `name` of the model."""
    from transformers.core_model_loading import revert_weight_conversion

    restored: dict[str, Tensor] = revert_weight_conversion(model, {name: tensor})
    return restored


def _fit(tensor: Tensor, shape: list[int]) -> Tensor | None:
    """Return `tensor` in the `shape` that it has in the source; None if it is another tensor."""
    if list(tensor.shape) == list(shape):
        return tensor
    # Experts of Qwen3-VL are transposed on the hub, which transformers finds by the shape: [E, H, 2I] <- [E, 2I, H]
    if tensor.ndim == 3 and list(tensor.mT.shape) == list(shape):
        return tensor.mT
    return None
