"""A name that cannot be loaded: one sentence that says if a folder or the hub is at fault, and no waiting."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from treepack.errors import TreepackError
from treepack.files.remote.hub import is_offline, load_fault, refuse_missing

FILES = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub at which nobody answers."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


def fault(name: str) -> str:
    return str(load_fault(name, ValueError("Repo id must be\n in the form"), kind="tokenizer"))


def refusal(name: str) -> str:
    with pytest.raises(TreepackError) as caught:
        refuse_missing(name, kind="tokenizer", files=FILES)
    return str(caught.value)


def test_a_folder_without_the_files_is_told_what_they_are(tmp_path: Path) -> None:
    expected = "contains no tokenizer; give a folder with tokenizer.json or tokenizer_config.json, or a hub name"
    assert refusal(str(tmp_path)) == f"{tmp_path}: {expected}"


def test_a_damaged_folder_has_the_reason_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    assert fault(str(tmp_path)) == (
        f"{tmp_path}: its tokenizer cannot be loaded (Repo id must be in the form); save it again with transformers"
    )


@pytest.mark.parametrize("name", ["./none", "/none", "a/b/c", "none.json", "none/"])
def test_a_path_that_does_not_exist_never_goes_to_the_hub(name: str) -> None:
    assert not is_offline(name)
    assert refusal(name) == (f"{name}: no such file or folder; give the folder of a tokenizer, or its name on the hub")


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "gpt2"])
def test_an_unreachable_hub_is_named_as_the_reason(name: str, no_hub: None) -> None:
    assert is_offline(name)
    assert "is no folder here, and the Hugging Face hub cannot be reached for a tokenizer" in fault(name)
