"""The costs of rows of hybrid models, by which a step is dealt to ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.oracle_model import packed_directory, tiny_config
from support.strategies import make
from support.tiny_families import DELTA_RULE
from treepack.costs.model_cost import shape_of
from treepack.train.options import TrainOptions
from treepack.train.run import TrainingRun
from treepack.train.setup.opening import open_run

CPU = TrainOptions(device="cpu", attention="reference")
HYBRID = {"model_type": "qwen3_5_text", "num_hidden_layers": 4, "full_attention_interval": 4, **DELTA_RULE}


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    # Two share half of their tokens. Rows of 24 and 15 tokens with unlike ratios of pairs to tokens.
    tokens = ([*range(10), 11, 12], [*range(10), *range(20, 32)], [*range(3, 18)])
    rollouts = [make(str(i), list(each)) for i, each in enumerate(tokens)]
    return packed_directory(tmp_path / "packed", rollouts, capacity=24)


def run_of(packed: Path, path: Path, **fields: Any) -> TrainingRun:
    return open_run(packed, tiny_config(path, **fields), CPU)


def test_a_row_of_a_hybrid_costs_the_forecast_of_its_layers(packed: Path, tmp_path: Path) -> None:
    run = run_of(packed, tmp_path / "hybrid.json", **HYBRID)
    causal = run.loaded.causal
    shape = shape_of(causal.config.to_dict(), name="hybrid")
    # The forecast counts matrices only: no norms, decays and biases of time steps.
    vectors = sum(each.numel() for each in causal.model.parameters() if each.ndim == 1)
    tokens, pairs = run.dataset.num_tokens, run.dataset.num_pairs
    assert len(tokens) > 1
    np.testing.assert_allclose(run.costs(), 2.0 * ((shape.per_token + vectors) * tokens + shape.scores * pairs))
