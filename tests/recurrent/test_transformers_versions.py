"""Versions of transformers and kernels whose recurrent layers cannot be computed on trees, or not alone in torch."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from torch import nn
from transformers.models.lfm2 import modeling_lfm2

from treepack.errors import TreepackError
from treepack.recurrent.entry import model_obstacle, plain_functions, upgrade_hint


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("5.9.0", "install transformers 5.22 or later (5.9.0 is installed)"),
        ("5.21.0.dev0", "install transformers 5.22 or later (5.21.0.dev0 is installed)"),
        ("5.22.0", None),
        ("6.0.0rc1", None),
    ],
)
def test_versions_before_5_22_are_to_be_replaced(
    version: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    assert upgrade_hint() == expected


class Layer(nn.Module):
    """As in transformers 5.10: the layer keeps the function, so that replacing it in the module changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.causal_conv1d_fn = len

    def forward(self, hidden: list[int]) -> int:
        return self.causal_conv1d_fn(hidden)


class Config:
    """The configuration of a model with such a layer."""


def test_a_function_on_the_layer_is_refused_with_the_version_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("made_up.modeling_early")
    module.Layer = Layer  # type: ignore[attr-defined]
    module.causal_conv1d_fn = len  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_up", ModuleType("made_up"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Layer, "__module__", module.__name__)
    monkeypatch.setattr(Config, "__module__", "made_up.configuration_early")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.10.0")
    reason = model_obstacle(Config())
    assert reason is not None
    assert reason.startswith("carries a state from token to token in a way that this version of transformers offers")
    assert reason.endswith("; install transformers 5.22 or later (5.10.0 is installed)")


class Opaque(nn.Module):
    """A function as the package kernels may wrap it one day: nothing leads back to the function."""

    def forward(self, hidden: object) -> object:
        return hidden


def test_a_function_that_cannot_be_found_behind_its_wrapper_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = Opaque()
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", wrapper)
    monkeypatch.setattr(Layer, "__module__", modeling_lfm2.__name__)
    with pytest.raises(TreepackError, match="set USE_HUB_KERNELS=0 in the environment"), plain_functions(Layer()):
        pass
    assert modeling_lfm2.causal_conv1d_fn is wrapper
