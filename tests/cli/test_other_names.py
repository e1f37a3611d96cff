"""Names of other trainers and names that are gone: each is answered with the name here."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.command_line import Run, every_command

NAMES = import_module("treepack_cli.other_names")


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("train --learning-rate 1e-6", "--learning-rate is --lr here"),
        ("train --batch_size 4", "--batch_size is --rows-per-step here"),
        ("train --packing", "--packing is not needed: each row is packed, without an option"),
        ("train --max-length 4096", "--max-length is --capacity of treepack pack"),
        ("prepare --max-length 4096", "--max-length is --capacity here"),
        ("stats --carry 4096", f"--carry is gone; {NAMES.GONE['stats --carry']}"),
    ],
)
def test_a_known_name_is_answered_with_the_name_here(
    treepack: Run, tmp_path: Path, command: str, sentence: str
) -> None:
    name, option, *value = command.split()
    result = treepack(name, option, *value)
    assert (result.status, result.err.splitlines()[-1]) == (2, f"Error: {sentence}")
    config = tmp_path / "x.toml"
    config.write_text(f"{option[2:]} = 4096")
    result = treepack(name, "--config", config)
    assert (result.status, result.err.splitlines()[-1]) == (
        2,
        f"Error: {config}:1: {option[2:]}{sentence[len(option) :]}",
    )


def test_every_name_here_is_an_option_and_none_that_is_gone() -> None:
    options = {
        f"{each.name} {name}" for each in every_command() for parameter in each.params for name in parameter.opts
    }
    ours = [line[0] for line in NAMES.other_names() if " --" in line[0]]
    assert len(ours) > 50
    assert {*ours, *NAMES._TYPED.values()} - options == set()
    assert NAMES.GONE.keys() & options == set()


def test_every_name_of_trl_and_transformers_is_a_field_there() -> None:
    pytest.importorskip("trl")
    fields: set[str] = set()
    for package, folder in (("trl", "trainer"), ("transformers", "")):
        (root,) = find_spec(package).submodule_search_locations  # type: ignore[union-attr, misc]
        for path in [*Path(root, folder).glob("*_config.py"), *Path(root, folder).glob("training_args.py")]:
            nodes = ast.walk(ast.parse(path.read_text()))
            fields |= {
                each.target.id
                for each in nodes
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            }
    named = {name for line in NAMES.other_names() for name in line[1].split()}
    assert named - fields == set()
