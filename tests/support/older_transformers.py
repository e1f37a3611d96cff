"""A program for the environment of an older transformers: it makes tiny models, and reads the copies that were trained.

python older_transformers.py make FOLDER < {"qwen3": {options}, ...}    prints {"qwen3": null, "lfm3": "its reason"}
python older_transformers.py read FOLDER < ["qwen3", ...]               prints {"qwen3": [[log-probabilities]], ...}

It runs without treepack and without the packages of the tests.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

TOKENS = [[1, 2, 3, 4, 5, 6, 7, 8]]


def make(folder: Path, families: dict[str, dict[str, Any]]) -> dict[str, str | None]:
    """Save a random model of each family in FOLDER/NAME; return the reason for each that this version does not have."""
    sys.modules["support.oracle_model"] = types.SimpleNamespace(VOCABULARY=50)  # type: ignore[assignment]
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.tiny_families import save_family

    reasons: dict[str, str | None] = {}
    for name, options in families.items():
        try:
            save_family(options.pop("kind"), folder / name, **options)
            reasons[name] = None
        except Exception as error:  # a family that this version lacks, or whose options have other names here
            reasons[name] = f"{type(error).__name__}: {error}"[:200]
    return reasons


def read(folder: Path, names: list[str]) -> dict[str, Any]:
    """Return the log-probabilities of each model in FOLDER/NAME, or the error of reading it."""
    found: dict[str, Any] = {}
    for name in names:
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder / name, dtype=torch.float32, attn_implementation="eager"
            ).eval()
            with torch.no_grad():
                found[name] = model(torch.tensor(TOKENS), use_cache=False).logits[0].log_softmax(-1).tolist()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:200]
    return found


if __name__ == "__main__":
    target, value = Path(sys.argv[2]), json.load(sys.stdin)
    print(json.dumps(make(target, value) if sys.argv[1] == "make" else read(target, value)))
