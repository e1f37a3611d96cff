"""Options from a file: `--config FILE` of every command, and `--from-run RUN` of train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.command_line import Run, every_command
from support.oracle_model import packed_directory, tiny_config
from support.refusal import refusal
from support.strategies import make
from support.written_rollouts import write_rollouts
from treepack.objectives.objective import choose_objective
from treepack.objectives.registry import all_losses, presets_of
from treepack.train.options import TrainOptions
from treepack.train.saving.run_config import run_config


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with packed rows and the config of a model."""
    monkeypatch.chdir(tmp_path)
    packed_directory(tmp_path / "packed", [make(f"t{i}", [1, 2, 3, 10 + i, 5, 20 + i]) for i in range(6)], capacity=12)
    tiny_config(tmp_path / "tiny.json")
    return tmp_path


def test_every_command_reads_a_file_of_options() -> None:
    without = [each.name for each in every_command() if "config" not in {parameter.name for parameter in each.params}]
    assert without == []
    assert len([*every_command()]) >= 20


def test_a_file_gives_options_and_arguments(treepack: Run, tmp_path: Path) -> None:
    rollouts, out = write_rollouts(tmp_path / "rollouts.jsonl"), tmp_path / "data"
    config = tmp_path / "data.toml"
    config.write_text(
        f'input = ["{rollouts}"]\nout = "{out}"\nquiet = true\n[prepare]\ncapacity = 12\ntoo-long = "drop"\n'
        "[train]\nlr = 1\n"
    )
    options = ["--out", tmp_path / "same", "--capacity", 12, "--too-long", "drop", "--quiet"]
    results = [treepack("prepare", "--config", config), treepack("prepare", rollouts, *options)]
    assert [(each.status, each.err) for each in results] == [(0, "")] * 2
    packed = [json.loads((path / "packed" / "manifest.json").read_text()) for path in (out, tmp_path / "same")]
    assert packed[0]["capacity"] == 12
    assert packed[0]["files"] == packed[1]["files"]


def test_the_command_line_counts_more_than_a_file(treepack: Run, folder: Path) -> None:
    (folder / "run.toml").write_text(
        'packed = "packed"\nmodel = "tiny.json"\nsteps = 3\nbetas = [0.8, 0.9]\nloss = "sft"\nno_such = 1\n'
    )
    wrong = treepack("train", "--config", "run.toml", "--out", "out")
    assert wrong.status == 2
    assert wrong.err.endswith("Error: run.toml:6: no_such is not an option of treepack train.\n")
    (folder / "run.toml").write_text((folder / "run.toml").read_text().replace("no_such = 1\n", ""))
    assert (
        treepack("train", "--config", "run.toml", "--steps", "5", "--log-every", "3", "--out", "out").err.count(
            "training: step"
        )
        == 3
    )
    options = json.loads((folder / "out" / "run.json").read_text())["options"]
    assert (options["steps"], options["betas"]) == (5, [0.8, 0.9])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('steps = 1\nlr = "fast"', "x.toml:2: lr: 'fast' is not a valid float range."),
        ("[train]\n# twice\nlora_rnk = 8", "x.toml:3: lora_rnk is not an option of treepack train. Did you mean"),
        ("steps = 0", "x.toml:1: steps: 0 is not in the range x>=1."),
        ('compile = "no"', "x.toml:1: compile: expected true or false"),
        ("model = true", "x.toml:1: model: expected a number or a text"),
        ("lr = 1\n[train]\nlr = 2", "x.toml: lr is also in [train]; give it once"),
        ('project = """\nlr = 2"""\nlr = "x"', "x.toml: lr: 'x' is not a valid float range."),
        ("[trian]\nlr = 2", "x.toml:1: trian is not an option of treepack train."),
        ("lr", "x.toml: cannot be read as TOML ("),
    ],
)
def test_an_error_in_a_file_names_its_line_and_key(
    treepack: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.toml").write_text(text)
    result = treepack("train", "--config", "x.toml")
    assert result.status == 2
    assert result.err.splitlines()[-1].startswith(f"Error: {sentence}")


def test_an_option_of_a_file_counts_as_given(treepack: Run, folder: Path) -> None:
    (folder / "x.toml").write_text('plan = "packed"\nworkers = 2\n')
    result = treepack("pack", "packed", "--out", "x", "--config", "x.toml")
    assert "--plan gives the value of --workers; leave one of them out" in result.err


@pytest.mark.parametrize("given", [["--from-run", "first"], ["--config", "first/run.json"]])
def test_a_run_is_repeated_with_the_same_bits(
    treepack: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    options = "--steps 2 --rows-per-step 1 --lr 0.01 --warmup-steps 1 --seed 3 --save-dtype source --eval packed"
    assert treepack("train", "packed", "--model", "tiny.json", *options.split(), "--out", "first").status == 0
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    given = [each.replace("first", "../first") for each in given]
    assert treepack("train", *given, "--out", "second").status == 0
    first, second = folder / "first", folder / "elsewhere" / "second"
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    records = [json.loads((path / "run.json").read_text()) for path in (first, second)]
    names = ("options", "free_options", "chosen", "packed_sha256", "eval_sha256", "config_sha256")
    assert [records[0][name] for name in names] == [records[1][name] for name in names]


def written_run(folder: Path, options: TrainOptions) -> Path:
    """Write the run.json of a run with these options, and return its path."""
    record: dict[str, Any] = {"options": options.fixed_options, "free_options": options.free_options, "chosen": {}}
    inputs = {"packed": ["s3://rows/packed"], "model": "Qwen/Qwen3-8B"}
    (folder / "run.json").write_text(json.dumps({**record, "inputs": inputs, "folder": str(folder)}))
    return folder / "run.json"


@pytest.mark.parametrize("preset", presets_of(all_losses()))
def test_the_loss_of_a_run_is_given_back(tmp_path: Path, preset: str) -> None:
    objective = choose_objective(preset)
    table = run_config(written_run(tmp_path, TrainOptions(objective=objective)))
    names = [*objective.definition.available_options - {"loss_constants"}, "loss"]
    values = {name: table[name] for name in names if name in table}
    again = choose_objective(values.pop("loss"), **values)
    assert again.as_record() == objective.as_record()


def test_a_run_of_a_version_without_inputs_is_refused(tmp_path: Path) -> None:
    path = written_run(tmp_path, TrainOptions())
    record = json.loads(path.read_text())
    del record["inputs"]
    path.write_text(json.dumps(record))
    sentence = f"{path}: does not have 'inputs', so it cannot be repeated; give the options"
    assert refusal(run_config, path) == sentence


def test_a_run_is_a_file_of_train_only(treepack: Run, tmp_path: Path) -> None:
    path = written_run(tmp_path, TrainOptions())
    result = treepack("pack", "--config", path)
    assert f"{path}: is for treepack train, which wrote it; give a TOML file to --config" in result.err
