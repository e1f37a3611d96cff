"""The allocator of torch, for whose setting the commands that import torch care."""

from __future__ import annotations

import os
from importlib import import_module

import click
import pytest

stages = import_module("treepack_cli.stages")
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": "backend:native"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
    ],
    ids=["nothing", "new name", "old name"],
)
def test_segments_can_grow_unless_the_environment_says_otherwise(
    given: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "before")  # so that pytest removes the value of the command
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with click.Context(click.Command("train")):
        stages.import_torch()
    assert {name: os.environ[name] for name in NAMES if name in os.environ} == expected
