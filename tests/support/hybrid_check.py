"""Check exact gradients of tiny models with recurrent layers, also where transformers chooses packages for them.

python -m support.hybrid_check      checks all FAMILIES with the package `kernels`, and prints their names
"""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_FIELDS: dict[str, dict[str, Any]] = {
    "qwen3_next": _LINEAR,
    "kimi_linear": _LINEAR,
    "nemotron_h": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}
FAMILIES = list(_FIELDS)
_SCANS = {
    "qwen3_next": "torch_chunk_gated_delta_rule",
    "kimi_linear": "chunk_kimi_delta_attention",
    "nemotron_h": "mamba2_chunk_scan",
    "lfm2": "causal_conv1d_fn",
}


def check_family(kind: str, *, expected: str | None, use_kernels: bool = False) -> None:
    """Compare the gradients of a packed row with those of its trajectories alone, in float64.

    Args:
        kind: one of `FAMILIES`.
        expected: beginning of the module of the function that transformers has chosen for the scan or convolution;
            None for its own.
        use_kernels: True to let `kernels` replace what it can.
    """
    from support.oracle_model import Sample, make_row
    from support.tiny_families import family_config, spread_weights
    from treepack.data.batch import make_batch
    from treepack.model.load import load_model
    from treepack.model.verify.gradients import verify_gradients

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(family_config(kind, **_FIELDS[kind]).to_dict(), default=str))
        loaded = load_model(path, dtype=torch.float64)
    chosen = chosen_function(kind)
    assert chosen.__module__.startswith(expected or "transformers."), chosen.__module__
    if use_kernels:
        loaded.model.set_use_kernels(True)
    torch.manual_seed(0)
    spread_weights(loaded.model)
    lists = [range(1, 13), [*range(1, 7), 40, 41, 42, 43], [*range(1, 7), 40, 41, 7, 8], range(20, 27)]
    samples = [Sample(tuple(tokens), (0.0,) + (1.0,) * (len(tokens) - 1)) for tokens in lists]
    report = verify_gradients(loaded, [make_batch(make_row(samples))])
    assert report.passed, report.worst


def chosen_function(kind: str) -> Any:
    """Return the function that transformers' wrapper calls for the scan or convolution of a family."""
    function = getattr(sys.modules[f"transformers.models.{kind}.modeling_{kind}"], _SCANS[kind])
    function = getattr(function, "treepack_original", function)
    if isinstance(function, torch.nn.Module):
        function = inspect.getclosurevars(type(function).forward).nonlocals["func"]
    return inspect.getclosurevars(function).nonlocals["implementation"]


def _main() -> None:
    import transformers.utils.import_utils as installed

    # transformers 5.23 takes kernels 0.18.2, which wraps functions as 0.17.2 does.
    bounds = inspect.unwrap(installed.is_kernels_available)
    bounds.__defaults__ = ("0.17.0", "0.19.0")
    assert installed.is_kernels_available()
    packages = {"qwen3_next": "fla.", "kimi_linear": "fla.", "nemotron_h": "mamba_ssm.", "lfm2": "causal_conv1d"}
    for kind in FAMILIES:
        check_family(kind, expected=packages[kind], use_kernels=True)
        print(kind)


if __name__ == "__main__":
    _main()
