"""The policy of the reproduction: a causal model of Qwen3's shape with random weights, small enough for many runs.

make_policy("small", seed=0) -> Qwen3ForCausalLM, 3.2 million parameters, float32
save_policy(model, folder), load_policy(folder)        a folder that treepack and transformers load
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from words import PAD, WORDS

from treepack.errors import TreepackError
from treepack.model.load import hide_progress_bars

MAX_POSITIONS = 512
SHAPES: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4},
    "large": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4},
    "tiny": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2},
    "test": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
}


def make_policy(shape: str, *, seed: int) -> Any:
    """Return a policy with random weights in float32 on the CPU.

    Args:
        shape: "small" and "large" for a GPU, 3.2 and 4.8 million parameters; "tiny" for a CPU; "test" for tests.
        seed: seed of the weights; the random state of the process stays as it was.

    Raises:
        TreepackError: there is no such shape.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if shape not in SHAPES:
        raise TreepackError(f"shape is {shape!r}; expected one of {', '.join(SHAPES)}")
    sizes = SHAPES[shape]
    config = Qwen3Config(
        vocab_size=len(WORDS),
        **sizes,
        num_key_value_heads=sizes["num_attention_heads"] // 2,
        head_dim=sizes["hidden_size"] // sizes["num_attention_heads"],
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).float().eval()


def save_policy(model: Any, folder: str | Path) -> None:
    """Write the config and the weights to a new or empty folder.

    Raises:
        TreepackError: the folder contains something.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise TreepackError(f"{folder}: is not empty; give a new folder")
    with hide_progress_bars():
        model.save_pretrained(folder)


def load_policy(folder: str | Path, *, device: torch.device | str = "cpu") -> Any:
    """Return a saved policy in float32 on `device`.

    Raises:
        TreepackError: the folder contains no policy.
    """
    from transformers import AutoModelForCausalLM

    if not (Path(folder) / "config.json").exists():
        raise TreepackError(f"{folder}: has no config.json; write a policy with warm_up.py first")
    with hide_progress_bars():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
