"""Dropout in training mode is refused by name, wherever a model keeps its rate; in eval mode it does nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import nn

from support.refusal import refusal
from treepack import TreepackError
from treepack.model.dropout import check_dropout, stop_dropout


class Functional(nn.Module):
    """A module that keeps the rate of its dropout as a number, as attention modules of transformers do."""

    def __init__(self, **rates: Any) -> None:
        super().__init__()
        vars(self).update(rates)


@pytest.mark.parametrize(
    ("module", "rate"),
    [
        (nn.Dropout(0.05), "0.05"),
        (nn.Dropout2d(1), "1"),
        (Functional(attention_dropout=0.1), "0.1"),
        (Functional(layerdrop=0.25), "0.25"),
        (Functional(rank_dropout={"default": 0.0, "second": 0.5}), "0.5"),
    ],
)
def test_an_active_dropout_is_refused_with_its_place_and_rate(module: nn.Module, rate: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(module))
    assert f"Sequential: 1.0 has a dropout of {rate} in training mode" in refusal(check_dropout, model)
    check_dropout(model.eval())


def test_only_the_mode_of_the_dropout_counts() -> None:
    model = nn.Sequential(nn.Dropout(0.1))
    model.training = False
    assert "dropout" in refusal(check_dropout, model)


def test_a_rate_of_0_a_flag_and_a_name_pass() -> None:
    config = SimpleNamespace(dropout=0.1)
    model = nn.Sequential(nn.Dropout(0.0), Functional(dropout=0.0, use_dropout=True, dropout_kind="none"))
    model.config = config  # type: ignore[assignment]
    check_dropout(model)


def test_every_dropout_of_a_built_model_is_set_to_0_with_one_note_for_each_name() -> None:
    layers = [Functional(attention_dropout=0.1, rank_dropout={"default": 0.0, "second": 0.5}) for _ in range(2)]
    model = nn.ModuleDict({"resid_dropout": nn.Dropout(0.25), "layers": nn.Sequential(*layers)})
    assert [note.split(":")[0] for note in stop_dropout(model)] == [
        "attention_dropout of 0.1 set to 0",
        "rank_dropout of 0.5 set to 0",
        "resid_dropout of 0.25 set to 0",
    ]
    check_dropout(model.train())
    assert stop_dropout(model) == ()


def test_the_dropout_of_an_adapter_is_refused_with_the_option_to_change() -> None:
    options = {"r": 2, "target_modules": ["0"]}
    model = peft.get_peft_model(nn.Sequential(nn.Linear(2, 2)), peft.LoraConfig(lora_dropout=0.05, **options))
    with pytest.raises(TreepackError, match=r"lora_dropout.default has a dropout of 0.05 .* set lora_dropout to 0"):
        check_dropout(model.train())
    model = peft.get_peft_model(nn.Sequential(nn.Linear(2, 2)), peft.LoraConfig(lora_dropout=0.0, **options))
    check_dropout(model.train())
    assert model(torch.zeros(1, 2)).shape == (1, 2)
