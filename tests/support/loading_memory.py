"""Peak CPU memory of a mixture of experts while it is loaded and saved, in one process and in each of several ranks.

    make_checkpoint --> a checkpoint with one tensor per expert     --peaks--> bytes to read, to load and to save it

Every measurement is a new process (or new ranks) and starts after all imports; pages of open files count. Reading ends
with all weights in memory, loading with the probe of the model. Needs Linux.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import distributed
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from treepack.model import load
from treepack.model.load import hide_progress_bars
from treepack.model.saved_files import copied_files, with_model, write_files
from treepack.model.weights.writing import saved_weights
from treepack.train import sharding
from treepack.train.options import TrainOptions

_PROCESSES = multiprocessing.get_context("spawn")
CPU = torch.device("cpu")


def make_checkpoint(folder: Path, *, layers: int, experts: int, width: int) -> Path:
    """Write a Qwen3-MoE checkpoint with one tensor per expert and one file per layer; return its directory."""
    config = Qwen3MoeConfig(
        hidden_size=width,
        moe_intermediate_size=width,
        num_experts=experts,
        num_hidden_layers=layers,
        num_experts_per_tok=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=width // 8,
        vocab_size=8192,
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict().items():
        part = parts.setdefault(".".join(name.split(".")[:3]), {})
        values = torch.randn(tensor.shape, dtype=torch.bfloat16) * 0.02
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            part[name] = values
            continue
        prefix, _, kind = name.rpartition(".")
        for expert, matrix in enumerate(values):
            if kind == "gate_up_proj":
                gate, up = matrix.chunk(2)
                part[f"{prefix}.{expert}.gate_proj.weight"] = gate.clone()
                part[f"{prefix}.{expert}.up_proj.weight"] = up.clone()
            else:
                part[f"{prefix}.{expert}.down_proj.weight"] = matrix.clone()
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(parts.values()):
        save_file(tensors, folder / f"part-{number}.safetensors", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, f"part-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def peak(function: Callable[[], Any]) -> tuple[Any, int]:
    """Call the function; return its result, and by how many bytes the memory of this process grew at its peak."""
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the memory of now
    result = function()
    return result, _memory("VmHWM") - before


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def measure(rank: int, size: int, folder: Path, source: Path) -> None:
    """Load and save in this process, as one of `size` ranks; write the three peaks into `folder`."""
    torch.set_num_threads(1)
    with hide_progress_bars():
        _measure(rank, size, folder, source)


def _measure(rank: int, size: int, folder: Path, source: Path) -> None:
    out = folder / "out"
    if size > 1:
        store = distributed.FileStore(str(folder / "meeting"), size)  # type: ignore[attr-defined]
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    # A first model is loaded before the measurement, so that imports do not count.
    make_checkpoint(folder / f"tiny-{rank}", layers=1, experts=4, width=64)
    load.load_model(folder / f"tiny-{rank}")
    reading: list[int] = []
    before = _memory("VmRSS")
    module: Any = sharding if size > 1 else load
    probe = module.with_attention

    def record_and_probe(*arguments: Any) -> Any:
        reading.append(_memory("VmHWM") - before)
        return probe(*arguments)

    module.with_attention = record_and_probe  # called between the two parts of loading
    begin = functools.partial(sharding.load_sharded, source, TrainOptions(device="cpu"), CPU) if size > 1 else None
    loaded, loading = peak(begin or functools.partial(load.load_model, source))
    assert not any("whole model" in note for note in loaded.notes)
    if size > 1:
        distributed.barrier()
    _, saving = peak(functools.partial(_save, loaded, rank, out))
    if size > 1:
        distributed.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps([*reading, loading, saving]))


def _save(loaded: Any, rank: int, out: Path) -> None:
    weights = saved_weights(loaded.model)
    assert weights is not None
    if rank == 0:
        write_files(with_model(copied_files(loaded.source), loaded.causal), out)
        weights.write(out)
    else:
        weights.gather()


def peaks(source: Path, *, size: int) -> list[tuple[int, int, int]]:
    """Return the peaks of reading, loading and saving in bytes, of every rank."""
    # Else glibc keeps freed blocks of up to 32 MiB, such as gathered layers, in heaps that grow with their number: with
    # 24 layers of 25 MiB the probe of two ranks needed 1,431 MiB instead of 419.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1000000"
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        processes = [
            _PROCESSES.Process(target=measure, args=(rank, size, Path(folder), source)) for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode:
                raise SystemExit(f"a process ended with {process.exitcode}")
        figures = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]
        return [(reading, loading, saving) for reading, loading, saving in figures]


def num_bytes(source: Path) -> tuple[int, int]:
    """Return the bytes of the whole model in float32, and of its largest part (a layer, or the embeddings)."""
    files = [path.stat().st_size * 2 for path in source.glob("*.safetensors")]
    return sum(files), max(files)
