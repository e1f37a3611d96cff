"""A checkpoint from elsewhere cannot run code, read or write outside of it, or give a run a wrong state in silence.

Each change is sealed with right hashes, as whoever alters a checkpoint can do.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.command_line import Run
from support.oracle_model import packed_directory, tiny_config
from support.refusal import refusal
from support.strategies import make
from treepack.errors import TreepackError
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.saving.checkpoint import latest
from treepack.train.saving.checkpoint_files import RECORD, read_record, write_record
from treepack.train.setup.opening import open_run

OPTIONS = TrainOptions(device="cpu", lr=1e-2, rows_per_step=1, steps=3, checkpoint_every=1)
STEP = "step-00000002"
FILE = "rank-00000-000.safetensors"
NORM = "model.model.norm.weight"
Content = tuple[dict[str, Tensor], dict[str, Any]]  # tensors, and start and shape of the whole by name


class Code:
    """A value whose pickle makes the folder `flag` when it is loaded."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.flag),)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows, a configuration, and a run that stopped after its second step."""
    folder = tmp_path_factory.mktemp("trained")
    packed_directory(folder / "packed", [make(f"t{i}", [1, 2, 3 + i, 4]) for i in range(4)], capacity=8)
    tiny_config(folder / "tiny.json")
    run_on(folder, folder / "run", until=2)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of that folder, which the test may change."""
    return Path(shutil.copytree(trained, tmp_path, dirs_exist_ok=True))


@pytest.fixture
def step(folder: Path) -> Path:
    """The checkpoint that the test changes."""
    return folder / "run" / "checkpoints" / STEP


def run_on(folder: Path, out: Path | str, *, until: int | None = None, init_from: Path | None = None) -> list[int]:
    options = replace(OPTIONS, init_from=None if init_from is None else str(init_from))
    steps: list[int] = []
    stop = lambda: len(steps) + 1 == until  # noqa: E731
    for metrics in train(open_run(folder / "packed", folder / "tiny.json", options), out, resume=True, stop=stop):
        steps.append(metrics.step)
    return steps


def seal(step: Path, **changes: Any) -> None:
    """Write checkpoint.json again, with the hashes that the files have now and with changed entries."""
    record = read_record(step)
    assert isinstance(record, dict)
    files = [
        {"name": path.name, "bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted(step.glob("rank-*"))
    ]
    fields = {name: changes.get(name, record[name]) for name in ("step", "position", "groups")}
    write_record(step, fields, changes.get("files", files), world_size=record["world_size"])


def read(path: Path) -> Content:
    with safe_open(path, "pt") as file:
        return load_file(path), json.loads(file.metadata()["parts"])


def write(step: Path, *contents: Content) -> None:
    """Write one file for each of the contents."""
    for number, (tensors, places) in enumerate(contents):
        save_file(tensors, step / f"rank-{number:05d}-000.safetensors", metadata={"parts": json.dumps(places)})
    seal(step)


def halves(content: Content, name: str, first: slice, second: slice) -> tuple[Content, Content]:
    """Return the content with the rows `first` of one tensor, and a file with its rows `second`."""
    tensors, places = content
    whole, shape = tensors[name], places[name][1]
    start = [0] * (len(shape) - 1)
    one = {**tensors, name: whole[first].clone()}, {**places, name: [[first.start, *start], shape]}
    return one, ({name: whole[second].clone()}, {name: [[second.start, *start], shape]})


def test_all_files_are_safetensors_and_json(step: Path) -> None:
    assert sorted(path.name for path in step.iterdir()) == [RECORD, FILE]
    tensors, places = read(step / FILE)
    assert tensors.keys() == places.keys()
    kinds = {name.split(".")[0] for name in tensors}
    assert kinds == {"model", "optimiser", "random"}
    record = json.loads((step / RECORD).read_text())
    assert record["groups"][0]["betas"] == [0.9, 0.95]


@pytest.mark.parametrize("source", ["run", f"run/checkpoints/{STEP}"])
def test_a_pickle_in_place_of_tensors_is_one_sentence_when_a_run_starts_from_it(
    treepack: Run, folder: Path, step: Path, source: str
) -> None:
    flag = folder / "flag"
    (step / FILE).write_bytes(pickle.dumps(Code(flag)))
    seal(step)
    pickle.loads((step / FILE).read_bytes())
    assert flag.is_dir()  # a reader of pickles does run the code, so that this test is about something
    flag.rmdir()
    result = treepack(
        *("train", folder / "packed", "--model", folder / "tiny.json", "--init-from", folder / source),
        *("--device", "cpu", "--steps", 1, "--out", folder / "new"),
    )
    assert result.status == 1
    assert result.err.splitlines()[-1].startswith(f"treepack: {step / FILE}: is not a file of a checkpoint (")
    assert not flag.exists()
    assert not (folder / "new").exists()


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "model.safetensors", "rank-00000-000.pt"])
def test_a_file_of_another_name_is_not_read(folder: Path, step: Path, name: str) -> None:
    content = pickle.dumps(Code(folder / "flag"))
    (step / name).write_bytes(content)
    assert run_on(folder, folder / "run") == [3]
    assert not (folder / "flag").exists()


@pytest.mark.parametrize(
    "name",
    ["../../escaped", "/tmp/escaped", "..", "", ".metadata", "__0_0.distcp", f"../{STEP}/{FILE}", f"{FILE}\n", "x.pt"],
)
def test_a_record_of_files_of_other_names_is_refused(folder: Path, name: str) -> None:
    run = folder / "run" / "checkpoints"
    for each in run.iterdir():
        seal(each, files=[{"name": name, "bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}])
    assert f"{STEP} is damaged ({RECORD} has wrong entries of files)" in refusal(latest, run)


@pytest.mark.parametrize("field", ["world_size", "position", "groups", "files", "step"])
def test_a_record_without_a_field_is_damaged_and_not_a_traceback(step: Path, field: str) -> None:
    path = step / RECORD
    record = json.loads(path.read_text())
    del record["sha256"], record[field]
    reseal(path, record)
    assert read_record(step) in (f"{RECORD} has wrong fields", f"{RECORD} was altered")


def reseal(path: Path, record: dict[str, Any]) -> None:
    record.pop("sha256", None)
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(record | {"sha256": digest}))


def test_a_record_of_deep_brackets_is_damaged(step: Path) -> None:
    (step / RECORD).write_text("[" * 100_000)
    fault = read_record(step)
    assert isinstance(fault, str)
    assert fault.startswith(f"{RECORD} cannot be read: RecursionError")


def test_a_checkpoint_of_version_0_2_0_is_refused_by_name(folder: Path, step: Path) -> None:
    record = json.loads((step / RECORD).read_text()) | {"version": 1, "treepack": "0.2.0"}
    record["files"] = [{"name": ".metadata", "bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}]
    del record["groups"]
    reseal(step / RECORD, record)
    sentence = (
        f"{step}: treepack 0.2.0 wrote this checkpoint in version 1 of its format, and this treepack reads version 2; "
        "finish the run with treepack 0.2.0, or start a new --out"
    )
    for out, init_from in ((folder / "run", None), (folder / "new", step), (folder / "new", folder / "run")):
        assert refusal(run_on, folder, out, init_from=init_from) == sentence
    assert not (folder / "new").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x" * 50,
        struct.pack("<Q", 1 << 60) + b"{}",  # a header of an exabyte
        struct.pack("<Q", 99_000_000) + b"{" * 10,
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        pickle.dumps({"a": 1}),
        torch.zeros(3).numpy().tobytes(),
    ],
)
def test_a_file_of_another_kind_is_one_sentence(folder: Path, step: Path, content: bytes) -> None:
    (step / FILE).write_bytes(content)
    seal(step)
    with pytest.raises(TreepackError, match=r"^[^\n]*(is not a file of a checkpoint|has no model)[^\n]*; take [^\n]*$"):
        run_on(folder, folder / "run")


@pytest.mark.parametrize(
    "parts", ["[" * 100_000, "{", "[]", "{}", "null", '{"a": 1}', None, json.dumps({NORM: [[0.0], [16]]})]
)
def test_places_of_another_form_are_one_sentence(folder: Path, step: Path, parts: str | None) -> None:
    tensors, _ = read(step / FILE)
    save_file(tensors, step / FILE, metadata=None if parts is None else {"parts": parts})
    seal(step)
    assert "it does not have the places of its tensors" in refusal(run_on, folder, folder / "run")


def change_place(name: str, start: list[Any], shape: list[Any]) -> Callable[[Content], list[Content]]:
    return lambda content: [(content[0], {**content[1], name: [start, shape]})]


def change_tensor(name: str, tensor: Tensor) -> Callable[[Content], list[Content]]:
    tensors = {name: tensor}
    return lambda content: [(content[0] | tensors, {**content[1], name: [[0] * tensor.ndim, list(tensor.shape)]})]


def drop(name: str) -> Callable[[Content], list[Content]]:
    return lambda content: [tuple({key: value for key, value in each.items() if key != name} for each in content)]  # type: ignore[list-item]


def cut(name: str, first: slice, second: slice) -> Callable[[Content], list[Content]]:
    return lambda content: list(halves(content, name, first, second))


EMBED, MOMENT = "model.model.embed_tokens.weight", f"optimiser.{NORM.removeprefix('model.')}.exp_avg"
STEPS = f"optimiser.{NORM.removeprefix('model.')}.step"
INCOMPLETE = "are not the whole tensor"


@pytest.mark.parametrize(
    ("change", "fault", "in_weights"),
    [
        (cut(EMBED, slice(0, 4), slice(6, 8)), INCOMPLETE, True),  # a hole
        (cut(EMBED, slice(0, 4), slice(4, 6)), INCOMPLETE, True),  # an end that is missing
        (cut(EMBED, slice(0, 4), slice(0, 4)), INCOMPLETE, True),  # the number of elements is right, the places are not
        (change_place(NORM, [1 << 50], [16]), INCOMPLETE, True),
        (change_place(NORM, [-1], [16]), INCOMPLETE, True),
        (change_place(NORM, [0], [1 << 50]), INCOMPLETE, True),
        (change_place(NORM, [0], [1 << 70]), "does not have the places", True),
        (change_place(NORM, [0, 0], [16, 1]), INCOMPLETE, True),
        (change_place(NORM, [], []), INCOMPLETE, True),
        (change_place(NORM, [False], [16]), "does not have the places", True),
        (change_place(NORM, [0], [16.0]), "does not have the places", True),
        (change_place(MOMENT, [0], [17]), INCOMPLETE, True),
        (drop(NORM), r"the checkpoint has no model\.norm\.weight", True),
        (change_tensor(NORM, torch.ones(16).to(torch.float8_e4m3fn)), INCOMPLETE, True),
        (change_tensor(NORM, torch.ones(16, dtype=torch.float64)), r"is torch\.float64 of shape \(16,\) in", True),
        (change_tensor(NORM, torch.ones(15)), r"of shape \(15,\) in the checkpoint and", True),
        (change_tensor("model.foreign", torch.ones(2)), "the model has no foreign", True),
        (change_tensor(MOMENT, torch.ones(16, dtype=torch.float64)), r"is torch\.float64 of shape \(16,\) in", False),
        (change_tensor(MOMENT, torch.ones(1)), r"exp_avg is torch\.float32 of shape \(1,\)", False),
        (change_tensor(STEPS, torch.ones(2)), r"step is torch\.float32 of shape \(2,\)", False),
        (change_tensor(STEPS, torch.tensor(2)), r"step is torch\.int64 of shape \(\)", False),
        (drop(MOMENT), r"the optimiser's state of model\.norm\.weight is not complete", False),
        (change_tensor("optimiser.foreign.step", torch.ones(())), r"the run has no optimiser\.foreign\.step", False),
        (change_tensor("foreign", torch.ones(2)), "the run has no foreign", False),
        (change_tensor("random.0.torch", torch.ones(5056, dtype=torch.uint8)), "random states fit no", False),
        (change_tensor("random.0.torch", torch.ones(7, dtype=torch.uint8)), r"random\.0\.torch is torch\.uint8", False),
        (change_tensor("random.0.numpy", torch.full((625,), 1 << 40)), "random states fit no generator", False),
        (change_tensor("random.0.python", torch.full((625,), -1)), "random states fit no generator", False),
        (drop("random.0.normal"), "random states fit no generator", False),
    ],
)
def test_a_checkpoint_that_lacks_a_part_or_has_a_foreign_one_is_refused(
    folder: Path, step: Path, change: Callable[[Content], list[Content]], fault: str, in_weights: bool
) -> None:
    write(step, *change(read(step / FILE)))
    with pytest.raises(TreepackError, match=rf"^[^\n]*{fault}[^\n]*; take [^\n]*$"):
        run_on(folder, folder / "run")
    if in_weights:
        with pytest.raises(TreepackError, match=fault):
            run_on(folder, folder / "new", init_from=step)


def test_a_tensor_cut_in_two_files_is_read_whole(folder: Path, step: Path) -> None:
    whole = shutil.copytree(folder / "run", folder / "whole")
    write(step, *halves(read(step / FILE), EMBED, slice(0, 5), slice(5, None)))
    for out in (folder / "run", whole):
        assert run_on(folder, out) == [3]
    assert (folder / "run" / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"groups": []}, "contains 0 groups"),
        ({"groups": [1, 2]}, "its groups of parameters are another optimiser's"),
        ({"groups": [{"params": []}, {"params": []}]}, "its groups of parameters are another optimiser's"),
        ({"position": {}}, "its position is not that of a run"),
        ({"position": {"step": -1, "skipped": 0, "score": {}}}, "its position is not that of a run"),
        ({"position": {"step": 1, "skipped": 0, "score": {"foreign": 1}}}, "its position is not that of a run"),
    ],
)
def test_json_of_another_form_is_one_sentence(folder: Path, step: Path, changes: dict[str, Any], fault: str) -> None:
    seal(step, **changes)
    with pytest.raises(TreepackError, match=rf"^{step}: {fault}[^\n]*$"):
        run_on(folder, folder / "run")


@pytest.mark.parametrize("field", ["lr", "betas", "fused", "params"])
def test_an_option_of_another_kind_is_refused(folder: Path, step: Path, field: str) -> None:
    groups = json.loads((step / RECORD).read_text())["groups"]
    groups[0][field] = "a text"
    seal(step, groups=groups)
    assert refusal(run_on, folder, folder / "run").endswith(
        "its groups of parameters are another optimiser's; take another checkpoint"
    )
