"""GRPOTrainer of TRL trains on trees that transformers' continuous batching samples from the trainer's own weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from treepack.rollout.in_process.local import LocalEngine, LocalOptions
from treepack.rollout.options import TreeOptions

pytestmark = pytest.mark.slow


def test_a_trainer_samples_trees_from_the_weights_that_it_trains(tmp_path: Path) -> None:
    from support import trl_runs
    from treepack.rollout.trainers.trl_rollout import trainer_sampling, tree_rollouts

    runs: Any = trl_runs

    def engine(trainer: Any) -> LocalEngine:
        return LocalEngine(trainer.model, trainer_sampling(trainer), options=LocalOptions(cache_tokens=4096))

    rollouts = tree_rollouts(TreeOptions(segment=8, depth=4), engine=engine)
    calls: list[Any] = []

    def recorded(prompts: list[str], trainer: Any) -> dict[str, Any]:
        columns = rollouts(prompts, trainer)
        for prompt, completion, logprobs in zip(
            columns["prompt_ids"], columns["completion_ids"], columns["logprobs"], strict=True
        ):
            ids = torch.tensor([prompt + completion])
            with torch.no_grad():
                logits = trainer.model(ids).logits[0, len(prompt) - 1 : -1].float() / trainer.temperature
            expected = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            calls.append(float((expected - torch.tensor(logprobs)).abs().max()))
        return columns

    more = {"rollout_func": recorded}
    model = runs.tiny_model(tmp_path / "model")
    base = runs.tree_trainer(runs.GRPOTrainer)
    try:
        record = runs.train(base, model, tmp_path / "out", more=more, max_steps=2, learning_rate=1e-2)
    finally:
        rollouts.close()
    assert np.isfinite(record.losses).all()
    # The second step samples from the weights that the first one has changed.
    assert len(calls) == 16
    assert max(calls) < 1e-5
