"""Losses as values: every loss of treepack, and losses of other packages, which register under `treepack.losses`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.oracle_model import gradients, tiny_config, worst_error, write_rows
from support.oracle_objectives import Rollout, own_logprobs
from support.packed_objectives import as_trajectories, opened, packed_model, plain, rollouts
from support.paths import ROOT
from support.refusal import refusal
from support.value_models import critic, valued
from treepack.carry.backward import CarryOptions, RowsInPieces
from treepack.data.joined import join_rows
from treepack.errors import TreepackError
from treepack.model.forward import RowRunner, WholeRows
from treepack.model.loaded import LoadedModel
from treepack.objectives.check_loss import check_loss
from treepack.objectives.denominators import step_factors, trajectory_table
from treepack.objectives.loss import Loss, Preset
from treepack.objectives.objective import Objective, choose_objective
from treepack.objectives.registry import all_losses, find_loss, own_losses
from treepack.objectives.row_numbers import LossPart
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.ranks import Ranks
from treepack.train.setup.opening import open_run, resume_run

TOLERANCE = 1e-9
MIXED = [i * i % 3 % 2 + (i > 6) for i in range(10)]

# A loss of tokens with a constant and a column of its own, a loss of sequences, and a loss of pairs whose name TRL has.
MODULE = """
from treepack.objectives.loss import CLIPS, Loss, Preset, Whole
from treepack.objectives.surrogates import Surrogate, outside, whole_ratio


def pulled(terms, objective):
    pull = objective.constants["pull"] * (terms.current - terms.columns.ref_logprob.double()).square()
    return FORMULA


SPO = Loss(
    name="spo",
    presets={"spo": Preset({"denominator": "token"}), "spo_hard": Preset({"clip_low": 0.1, "denominator": "group"})},
    surrogate=pulled,
    options=CLIPS,
    constants={"pull": 0.3},
    bounds={"pull": (0.0, 1.0)},
    reads=("term_ref_logprob",),
)


def bent(terms, objective):
    ratio = whole_ratio(terms.current, terms)
    return Surrogate(ratio.tanh() * terms.advantage, ratio=ratio)


SEQPO = Loss(
    name="seqpo",
    presets={"seqpo": Preset({"denominator": "trajectory"})},
    whole=Whole(lambda terms, _: WHOLE, bounds=(-0.2, 0.2)),
    surrogate=bent,
)

IPO = Loss(
    name="ipo",
    presets={"ipo": Preset({"beta": 0.5})},
    over="pairs",
    surrogate=lambda h, objective: PAIRS,
    options=frozenset({"beta"}),
)
"""
FORMULAS = {
    "FORMULA": "Surrogate(terms.ratio * terms.advantage - pull, *outside(terms.ratio, objective))",
    "WHOLE": "terms.current - terms.old",
    "PAIRS": "-(h - 1 / (2 * objective.beta)).square()",
}
ENTRIES = "[treepack.losses]\nspo = our_losses:SPO\nseqpo = our_losses:SEQPO\nipo = our_losses:IPO\n"


def installed(folder: Path, *, version: str = "1.0", entries: str = ENTRIES, **formulas: str) -> Path:
    """Write the package our-losses, as an installer would write it."""
    for old in folder.glob("*.dist-info"):
        shutil.rmtree(old)
    info = folder / f"our_losses-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: our-losses\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entries)
    module = MODULE
    for name, formula in {**FORMULAS, **formulas}.items():
        module = module.replace(name, formula)
    (folder / "our_losses.py").write_text(module)
    return folder


def forget() -> None:
    all_losses.cache_clear()
    find_loss.cache_clear()
    sys.modules.pop("our_losses", None)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The registry without the losses that it found before, in this test and after it."""
    forget()
    yield monkeypatch
    monkeypatch.undo()
    forget()


def spo(rollout: Rollout, logprobs: dict[int, Tensor], o: Any) -> dict[int, Tensor]:
    """The twin of the loss of tokens."""
    pulls = {j: o.constants["pull"] * (logprobs[j] - rollout.ref[j]) ** 2 for j in rollout.trained}
    return {j: pulls[j] - torch.exp(logprobs[j] - rollout.old[j]) * rollout.advantages[j] for j in rollout.trained}


def seqpo(rollout: Rollout, logprobs: dict[int, Tensor], _: Any) -> dict[int, Tensor]:
    """The twin of the loss of sequences: one ratio for all tokens, whose gradient goes to each token."""
    mean = sum(float(logprobs[j]) - rollout.old[j] for j in rollout.trained) / len(rollout.trained)
    mean = min(max(mean, -0.2), 0.2)
    ratios = {j: torch.exp(mean + logprobs[j] - logprobs[j].detach()) for j in rollout.trained}
    return {j: -torch.tanh(ratios[j]) * rollout.advantages[j] for j in rollout.trained}


def alone(twin: Any, o: Objective) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a step, trajectory by trajectory; `o` has the denominator token or trajectory."""
    model, total, count = plain("qwen3"), torch.zeros((), dtype=torch.float64), 0.0
    model.zero_grad()
    for rollout in rollouts():
        losses = twin(rollout, own_logprobs(model, rollout)[0], o)
        weight = sum(rollout.weights) if o.denominator == "trajectory" else 1.0
        total = total + rollout.weight * sum(rollout.weights[j] * losses[j] for j in rollout.trained) / weight
        count += rollout.weight * (1.0 if o.denominator == "trajectory" else sum(rollout.weights))
    torch.autograd.backward(total / count)
    return float(total) / count, gradients(model)


def ways_of(
    loaded: LoadedModel, path: Path, samples: Any, objective: Objective
) -> Iterator[tuple[float, dict[str, Tensor], dict[str, float]]]:
    """Yield loss, gradients and sums of a step: two packings, each whole, in pieces of 7 tokens, and joined."""
    pieces = RowsInPieces(loaded, CarryOptions(7, chunk=5))
    by_group = [i % 2 for i in range(10)]
    for i, rows in enumerate(([0] * 10, by_group if objective.has_pairs else MIXED)):
        dataset = opened(path / str(i), samples, rows)
        every = list(range(len(dataset)))
        factors = [torch.from_numpy(f) for f in step_factors(trajectory_table(dataset, objective), every, objective)]
        batches = [dataset[row] for row in every]
        joined = [join_rows(batches[::-1], multiple=8)], [torch.cat(factors[::-1])]
        whole: RowRunner = WholeRows(loaded, chunk=5)
        for runner, (own, f) in ((whole, (batches, factors)), (pieces, (batches, factors)), (whole, joined)):
            loaded.model.zero_grad()
            results = [runner.backward(b, LossPart(objective, each)) for b, each in zip(own, f, strict=True)]
            sums: dict[str, float] = {}
            for result in results:
                sums = {name: sums.get(name, 0.0) + float(value) for name, value in result.sums.items()}
            yield sum(float(result.loss) for result in results), gradients(loaded.model), sums


# Presets of one loss differ in their denominators, which test_objectives has.
@pytest.mark.parametrize(
    "name",
    [loss.name for loss in own_losses() if loss.name not in ("sft", "distill")],
)
def test_every_loss_has_one_value_whole_joined_and_in_pieces(tmp_path: Path, name: str) -> None:
    objective = choose_objective(name)
    check_loss(objective)
    first, *others = ways_of(critic("qwen3"), tmp_path, valued(), objective)
    assert first[0]
    assert len(others) == 5
    for loss, grads, sums in others:
        assert loss == pytest.approx(first[0], rel=TOLERANCE)
        assert worst_error(grads, first[1]) <= TOLERANCE
        assert sums == pytest.approx(first[2], rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize(("name", "twin"), [("spo", spo), ("seqpo", seqpo), ("ipo", None)])
def test_a_loss_of_an_installed_package_has_one_value_that_of_trajectories_alone(
    tmp_path: Path, fresh: pytest.MonkeyPatch, name: str, twin: Any
) -> None:
    fresh.syspath_prepend(installed(tmp_path / "site"))
    objective = choose_objective(name)
    assert objective.definition.package == "our-losses 1.0"
    check_loss(objective)
    expected = None if twin is None else alone(twin, objective)
    for loss, grads, sums in ways_of(packed_model("qwen3"), tmp_path, rollouts(), objective):
        expected = expected or (loss, grads)
        assert loss == pytest.approx(expected[0], rel=TOLERANCE)
        assert worst_error(grads, expected[1]) <= TOLERANCE
        assert sums["weight"] > 0
    assert all(float(each.abs().max()) > 0 for each in grads.values())


def test_constants_options_and_presets_of_a_package_are_checked(tmp_path: Path, fresh: pytest.MonkeyPatch) -> None:
    fresh.syspath_prepend(installed(tmp_path))
    assert choose_objective("spo_hard").denominator == "group"
    assert choose_objective("spo", loss_constants={"pull": 0}).constants == {"pull": 0}
    assert choose_objective("spo").columns == ("term_advantage", "term_ref_logprob")
    for name, options, message in (
        ("spo", {"loss_constants": {"pull": 2}}, "the constant pull is 2; expected 0 to 1"),
        ("spo", {"dual_clip": 2.0}, "dual_clip is not an option of the loss spo; it has clip_high, clip_low, den"),
        ("seqpo", {"clip_low": 0.1}, "clip_low is not an option of the loss seqpo"),
        ("nope", {}, "expected one of sft, cispo, .*, seqpo, spo, spo_hard, vespo, dpo, ipo, value"),
    ):
        with pytest.raises(TreepackError, match=message):
            choose_objective(name, **options)


@pytest.mark.parametrize(
    ("name", "formulas", "message"),
    [
        (
            "spo",
            {"FORMULA": "Surrogate(terms.current * (terms.advantage - terms.advantage.mean()))"},
            "the loss spo of our-losses 1.0: its quantity of a term depends on other terms or on chance: it is .* "
            "among 16 terms and .* alone, so packing and pieces would change the loss; compute each term",
        ),
        (
            "spo",
            {"FORMULA": "Surrogate((terms.current * terms.advantage).cumsum(0))"},
            "of a term depends on other terms",
        ),
        # The value is that of the term alone; its gradient is not.
        (
            "spo",
            {"FORMULA": "Surrogate(terms.current + terms.current.mean() - terms.current.mean().detach())"},
            "its slope of a term depends on other terms",
        ),
        (
            "spo",
            {"FORMULA": "Surrogate(terms.current * terms.current.detach().new_empty(1).uniform_())"},
            "or on chance",
        ),
        ("spo", {"FORMULA": "Surrogate(terms.current * terms.advantage.add_(1))"}, "its quantity of a term depends"),
        (
            "spo",
            {"FORMULA": "Surrogate(terms.current.sum())"},
            r"its quantity of 16 terms is \[\] of torch.float64; exp",
        ),
        (
            "spo",
            {"FORMULA": "Surrogate(terms.current.float())"},
            r"is \[16\] of torch.float32; expected \[16\] of torch",
        ),
        ("spo", {"FORMULA": "Surrogate(terms.current, terms.ratio)"}, "its low of 16 terms is .*expected .*torch.bool"),
        ("spo", {"FORMULA": "terms.current"}, "its surrogate returns a Tensor; expected a Surrogate"),
        ("spo", {"FORMULA": "Surrogate(terms.old * terms.advantage)"}, "its quantity has no gradient"),
        ("spo", {"FORMULA": "1 / 0"}, r"its formula fails \(.*division by zero\); repair the loss"),
        ("spo", {"FORMULA": "exit()"}, r"its formula fails \(.*\); repair the loss"),
        ("spo", {"FORMULA": "Surrogate(terms.current * terms.columns.returns)"}, "its formula fails"),
        ("seqpo", {"WHOLE": "terms.current - terms.current.mean()"}, "its whole of a term depends on other terms"),
        ("seqpo", {"WHOLE": "(terms.current - terms.old).mean()"}, r"its whole of 16 terms is \[\]"),
        ("ipo", {"PAIRS": "h - h.mean()"}, "its quantity of a term depends on other terms"),
        ("ipo", {"PAIRS": "h.sum()"}, r"its quantity of 16 terms is \[\]"),
    ],
)
def test_a_loss_that_would_depend_on_packing_or_fail_is_refused_when_a_run_opens(
    tmp_path: Path, fresh: pytest.MonkeyPatch, name: str, formulas: dict[str, str], message: str
) -> None:
    fresh.syspath_prepend(installed(tmp_path / "site", **formulas))
    packed = write_rows(tmp_path / "packed", as_trajectories(rollouts()), [0] * 10)
    with pytest.raises(TreepackError, match=message):
        open_run(
            packed, tiny_config(tmp_path / "tiny.json"), TrainOptions(device="cpu", objective=choose_objective(name))
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"presets": {"other": Preset({})}}, "the loss x: its name is not in presets; add it"),
        ({"presets": {"x": Preset({}), "x y": Preset({})}}, "a name is not made of letters, digits and _"),
        ({"surrogate": None}, "it is over terms and has no surrogate; give one"),
        ({"over": "values"}, "it is over values, which reads no surrogate and no whole; give neither"),
        ({"over": "tokens"}, "over is 'tokens'; expected one of weights, terms, pairs, values"),
        (
            {"options": frozenset({"epsilon"})},
            "options has epsilon; expected some of beta, clip_high, clip_low, dual_clip",
        ),
        ({"reads": ("term_bonus",)}, "reads has term_bonus; expected some of .*term_ref_logprob"),
        ({"bounds": {"c": (0, 1)}}, "bounds names a constant that is not there"),
        ({"presets": {"x": Preset({"clip_low": 0.1})}}, "a preset sets clip_low; expected options of the loss"),
    ],
)
def test_a_loss_whose_parts_contradict_each_other_is_refused(changes: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"name": "x", "presets": {"x": Preset({})}, "surrogate": lambda terms, _: terms}
    assert Loss(**fields).available_options >= {"kl", "denominator"}
    with pytest.raises(TreepackError, match=message):
        Loss(**{**fields, **changes})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("[treepack.losses]\nspo = no_such_thing:LOSS\n", "entry point 'spo' of treepack.losses: cannot be loaded"),
        (
            "[treepack.losses]\nspo = our_losses:pulled\n",
            "has the type function; expected a Loss of treepack.objectives.loss",
        ),
        (
            "[treepack.losses]\nspo = treepack.losses.grpo:LOSS\n",
            "our-losses 1.0, entry point 'spo' of treepack.losses: has the loss 'grpo', which exists already",
        ),
    ],
)
def test_an_entry_point_that_is_no_new_loss_is_refused_and_losses_of_treepack_stay(
    tmp_path: Path, fresh: pytest.MonkeyPatch, entries: str, message: str
) -> None:
    fresh.syspath_prepend(installed(tmp_path, entries=entries))
    assert choose_objective("grpo").loss == "grpo"
    with pytest.raises(TreepackError, match=message):
        choose_objective("spo")


def test_a_run_records_the_package_of_its_loss_and_no_other_version_resumes_it(
    tmp_path: Path, fresh: pytest.MonkeyPatch
) -> None:
    fresh.syspath_prepend(installed(tmp_path / "site"))
    packed = write_rows(tmp_path / "packed", as_trajectories(rollouts()), MIXED)
    config, out = tiny_config(tmp_path / "tiny.json"), tmp_path / "out"

    def options(**changes: Any) -> TrainOptions:
        return TrainOptions(device="cpu", lr=1e-2, rows_per_step=1, objective=choose_objective("spo"), **changes)

    list(train(open_run(packed, config, options(steps=2)), out))
    record = json.loads((out / "run.json").read_text())
    assert record["loss_package"] == "our-losses 1.0"
    assert record["options"]["objective"]["loss"] == "spo"
    assert not {"dual_clip", "beta"} & record["options"]["objective"].keys()
    installed(tmp_path / "site", version="1.1")
    forget()
    assert ("the package of --loss was 'our-losses 1.0' when the run started and is 'our-losses 1.1' now") in refusal(
        list, train(resume_run(packed, config, options(steps=3), out, Ranks()), out, resume=True)
    )
    installed(tmp_path / "site", version="1.0")
    forget()
    assert len(list(train(resume_run(packed, config, options(steps=3), out, Ranks()), out, resume=True))) == 1


def run_command(site: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from treepack_cli import main; main()", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(site)}
    return subprocess.run(command, env=environment, check=False, capture_output=True, text=True)


def test_a_package_that_cannot_be_loaded_stops_train_alone(tmp_path: Path) -> None:
    site = installed(tmp_path / "site", entries="[treepack.losses]\nspo = no_such_thing:LOSS\n")
    assert run_command(site, "pack", "--help").returncode == 0
    failed = run_command(site, "train", "--help")
    assert failed.returncode == 1
    assert failed.stderr.count("\n") == 1
    assert "our-losses 1.0, entry point 'spo' of treepack.losses: cannot be loaded (ModuleNotFound" in failed.stderr


@pytest.mark.slow
def test_the_command_line_trains_with_a_loss_of_a_package(tmp_path: Path) -> None:
    site = installed(tmp_path / "site")
    packed = write_rows(tmp_path / "packed", as_trajectories(rollouts()), MIXED)
    config = tiny_config(tmp_path / "tiny.json")
    train_command = ("train", packed, "--model", config, "--device", "cpu", "--out", tmp_path / "out", "--epochs", 1)
    done = run_command(site, *train_command, "--loss", "spo-hard", "--loss-constant", "pull=0.1")
    assert done.returncode == 0, done.stderr
    options = json.loads((tmp_path / "out" / "run.json").read_text())["options"]["objective"]
    assert (options["loss"], options["denominator"], options["loss_constants"]) == ("spo", "group", {"pull": 0.1})


def test_the_loss_of_the_page_is_one(tmp_path: Path, fresh: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "objectives.md").read_text()
    (program,) = [block for block in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "LOSS =" in block]
    site = installed(tmp_path, entries="[treepack.losses]\nspo = our_losses:LOSS\n")
    (site / "our_losses.py").write_text(program)
    fresh.syspath_prepend(site)
    objective = choose_objective("spo", kl=0.1, importance_cap=2.0)
    assert objective.constants == {"pull": 0.1}
    check_loss(objective)


def test_losses_are_found_without_torch() -> None:
    program = "import sys; from treepack.objectives.registry import all_losses as all; "
    program += "print(len(all()), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == f"{len(own_losses())} False\n"
