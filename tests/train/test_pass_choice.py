"""The measured memory of a pass: a straight line through two lengths, and no pass that a rank has no room for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.oracle_model import packed_directory, tiny_config
from support.strategies import make
from treepack.errors import TreepackError
from treepack.memory.device_memory import MemoryMeter
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel
from treepack.train.options import TrainOptions
from treepack.train.ranks import Ranks
from treepack.train.setup import layer_memory, pass_choice
from treepack.train.setup.compute import choose_compute
from treepack.train.setup.layer_memory import measure_pass
from treepack.train.setup.memory_input import MemoryInput
from treepack.train.setup.run_data import open_data

FIXED, PER_TOKEN = 5_000_000, 700
OPTIONS = TrainOptions(device="cpu")


class Passes:
    """A root module that counts the tokens of the passes that it runs, and a meter of passes of a straight line."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, function: Callable[[], Any]) -> Any:
        states = function()
        self.lengths.append(states.shape[-2])
        return states

    def reshard(self) -> None:
        """Do nothing: the model is whole."""

    @property
    def meter(self) -> MemoryMeter:
        return MemoryMeter(lambda: 1000, lambda: 1000 + FIXED + PER_TOKEN * self.lengths[-1], lambda: None)


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedModel:
    return load_model(tiny_config(tmp_path / "tiny.json"))


def test_two_lengths_give_the_bytes_of_a_token_and_of_a_pass_without_tokens(loaded: LoadedModel) -> None:
    passes = Passes()
    fixed, per_token = measure_pass(replace(loaded, root=passes), autocast=nullcontext, meter=passes.meter)
    assert fixed == FIXED
    assert per_token == PER_TOKEN
    assert passes.lengths == [1024, 1024, 3072]
    assert all(parameter.grad is None for parameter in loaded.model.parameters())


@pytest.mark.parametrize(("room", "longest"), [(10**9, 3072), (FIXED + 2000 * PER_TOKEN, 1024), (0, 128)])
def test_a_pass_that_a_rank_has_no_room_for_is_not_run(loaded: LoadedModel, room: int, longest: int) -> None:
    passes, asked = Passes(), []

    def all_have(num_bytes: int) -> bool:
        asked.append(num_bytes)
        return num_bytes <= room

    sharded = replace(loaded, root=passes)
    fixed, per_token = measure_pass(sharded, autocast=nullcontext, all_have=all_have, meter=passes.meter)
    assert fixed == FIXED
    assert per_token == PER_TOKEN
    assert max(passes.lengths) == longest
    assert asked == [FIXED + 1024 * PER_TOKEN, FIXED + 3072 * PER_TOKEN][: 1 if longest == 128 else 2]


@pytest.fixture
def given(tmp_path: Path, loaded: LoadedModel) -> MemoryInput:
    tokens = np.random.default_rng(0).integers(0, 24, 20).tolist()
    packed = packed_directory(tmp_path / "packed", [make("t", tokens)], capacity=40)
    return MemoryInput(
        data=open_data(packed, OPTIONS, Ranks()),
        held_out=None,
        loaded=loaded,
        options=OPTIONS,
        compute=choose_compute(OPTIONS),
        ranks=Ranks(),
    )


def test_memory_that_runs_out_in_a_pass_joins_no_rows_and_stops_a_rank_of_a_sharded_model(
    given: MemoryInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_memory, "gpu_meter", lambda _: MemoryMeter(lambda: 0, lambda: 0, lambda: None))

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    handle = given.loaded.causal.get_input_embeddings().register_forward_hook(fail)
    assert pass_choice.fitting_tokens(given) == 1
    # The other ranks wait inside the pass, so this one cannot meet them and must stop.
    sharded = replace(given, loaded=replace(given.loaded, root=Passes()))
    with pytest.raises(TreepackError, match=r"^out of memory while the memory of a pass was measured; train with a"):
        pass_choice.fitting_tokens(sharded)
    handle.remove()
