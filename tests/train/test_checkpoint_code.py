"""A checkpoint from elsewhere cannot run code or write outside of its copy, even if all of its hashes are right."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from support.command_line import Run
from support.oracle_model import packed_directory, tiny_config
from support.s3 import Store
from support.strategies import make
from treepack.errors import TreepackError
from treepack.train.loop import train
from treepack.train.options import TrainOptions
from treepack.train.saving.checkpoint import latest
from treepack.train.saving.checkpoint_files import RECORD, read_record, write_record
from treepack.train.setup.opening import open_run

OPTIONS = TrainOptions(device="cpu", lr=1e-2, rows_per_step=1, steps=3, checkpoint_every=1)
STEP = "step-00000002"


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


def run_on(folder: Path, out: Path | str, *, until: int | None = None, init_from: Path | None = None) -> list[int]:
    options = replace(OPTIONS, init_from=None if init_from is None else str(init_from))
    steps: list[int] = []
    stop = lambda: len(steps) + 1 == until  # noqa: E731
    for metrics in train(open_run(folder / "packed", folder / "tiny.json", options), out, resume=True, stop=stop):
        steps.append(metrics.step)
    return steps


def seal(step: Path, **changes: Any) -> None:
    """Write checkpoint.json again, with the hashes that the files have now."""
    record = read_record(step)
    assert isinstance(record, dict)
    files = [
        {"name": path.name, "bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted(step.iterdir())
        if path.name != RECORD
    ]
    fields = {"step": record["step"], "position": record["position"]}
    write_record(step, fields, changes.get("files", files), world_size=record["world_size"])


def code_in_metadata(step: Path, flag: Path) -> None:
    """Let the table of contents run code and then be itself."""
    metadata = FileSystemReader(step).read_metadata()
    metadata.planner_data = Code(flag)
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(step)


def code_in(name: str) -> Callable[[Path, Path], None]:
    """Return a function that lets one value of the state run code; a tensor becomes a value that is none."""

    def change(step: Path, flag: Path) -> None:
        blob = io.BytesIO()
        torch.save(Code(flag), blob)
        data = next(step.glob("__0_*"))
        metadata = FileSystemReader(step).read_metadata()
        (index,) = (index for index in metadata.storage_data if index.fqn == name)
        metadata.storage_data[index].offset = data.stat().st_size
        metadata.storage_data[index].length = len(blob.getvalue())
        with data.open("ab") as file:
            file.write(blob.getvalue())
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        (step / ".metadata").write_bytes(pickle.dumps(metadata))
        seal(step)

    return change


def assert_runs_code(step: Path, flag: Path) -> None:
    """Check that torch's own reader does run the code, so that the test below is about something."""
    FileSystemReader(step).read_metadata()
    assert flag.is_dir()
    flag.rmdir()


SENTENCE = r"which could run code and which treepack never writes; take a checkpoint that you trust"


@pytest.mark.parametrize("source", ["run", f"run/checkpoints/{STEP}"])
def test_a_hostile_checkpoint_runs_nothing_when_a_run_starts_from_it(treepack: Run, folder: Path, source: str) -> None:
    step, flag = folder / "run" / "checkpoints" / STEP, folder / "flag"
    code_in_metadata(step, flag)
    assert_runs_code(step, flag)
    result = treepack(
        *("train", folder / "packed", "--model", folder / "tiny.json", "--init-from", folder / source),
        *("--device", "cpu", "--steps", 1, "--out", folder / "new"),
    )
    assert result.status == 1
    assert result.err.splitlines()[-1] == f"treepack: {step}/.metadata: names posix.mkdir, {SENTENCE}"
    assert not flag.exists()
    assert not (folder / "new").exists()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (code_in_metadata, r"/\.metadata: names posix\.mkdir, "),
        (code_in("optimiser"), ": has more than plain values in optimiser, "),
        (code_in("random.0"), r": has more than plain values in random\.0, "),
    ],
)
def test_a_hostile_checkpoint_runs_nothing_when_its_run_is_resumed(
    folder: Path, change: Callable[[Path, Path], None], problem: str
) -> None:
    change(folder / "run" / "checkpoints" / STEP, folder / "flag")
    with pytest.raises(TreepackError, match=f"^{folder / 'run' / 'checkpoints' / STEP}{problem}{SENTENCE}$"):
        run_on(folder, folder / "run")
    assert not (folder / "flag").exists()


def test_a_weight_that_is_no_tensor_is_refused(folder: Path) -> None:
    step = folder / "run" / "checkpoints" / STEP
    code_in("model.model.norm.weight")(step, folder / "flag")
    with pytest.raises(TreepackError, match=r"model\.norm\.weight is not a tensor in the checkpoint"):
        run_on(folder, folder / "new", init_from=step)
    assert not (folder / "flag").exists()


@pytest.mark.s3
def test_a_hostile_checkpoint_in_a_store_runs_nothing(folder: Path, s3: Store) -> None:
    run_on(folder, s3.address("run"), until=2)
    step = folder / STEP
    step.mkdir()
    for key in s3.names(f"run/checkpoints/{STEP}/"):
        (step / Path(key).name).write_bytes(s3.read(key))
    code_in_metadata(step, folder / "flag")
    for path in step.iterdir():
        s3.write(f"run/checkpoints/{STEP}/{path.name}", path.read_bytes())
    with pytest.raises(TreepackError, match=SENTENCE):
        run_on(folder, s3.address("run"))
    assert not (folder / "flag").exists()


@pytest.mark.parametrize("name", ["../../escaped", "/tmp/escaped", "..", ""])
def test_names_that_lead_out_of_a_checkpoint_are_refused(folder: Path, name: str) -> None:
    run = folder / "run" / "checkpoints"
    for step in run.iterdir():
        seal(step, files=[{"name": name, "bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}])
    with pytest.raises(TreepackError, match=rf"{STEP} is damaged \({RECORD} has wrong entries of files\)"):
        latest(run)


@pytest.mark.parametrize("field", ["world_size", "position", "files", "step"])
def test_a_record_without_a_field_is_damaged_and_not_a_traceback(folder: Path, field: str) -> None:
    path = folder / "run" / "checkpoints" / STEP / RECORD
    record = json.loads(path.read_text())
    del record["sha256"], record[field]
    record["sha256"] = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(record))
    found = read_record(path.parent)
    assert found in (f"{RECORD} has wrong fields", f"{RECORD} was altered")


def test_a_record_of_deep_brackets_is_damaged(folder: Path) -> None:
    path = folder / "run" / "checkpoints" / STEP
    (path / RECORD).write_text("[" * 100_000)
    fault = read_record(path)
    assert isinstance(fault, str)
    assert fault.startswith(f"{RECORD} cannot be read: RecursionError")


@pytest.mark.parametrize("content", [b"", b"x" * 50, pickle.dumps({"a": 1}), pickle.dumps([1.5])])
def test_a_table_of_contents_of_another_kind_is_one_sentence(folder: Path, content: bytes) -> None:
    step = folder / "run" / "checkpoints" / STEP
    (step / ".metadata").write_bytes(content)
    seal(step)
    with pytest.raises(TreepackError, match=r"\.metadata: is not a table of contents of a checkpoint; take another"):
        run_on(folder, folder / "run")


def test_data_outside_of_the_checkpoint_is_not_read(folder: Path) -> None:
    step = folder / "run" / "checkpoints" / STEP
    metadata = FileSystemReader(step).read_metadata()
    next(iter(metadata.storage_data.values())).relative_path = "../step-00000001/__0_0.distcp"
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(step)
    with pytest.raises(TreepackError, match=r"\.metadata: is not a table of contents"):
        run_on(folder, folder / "run")


def no_chunks(entry: Any) -> Any:
    return replace(entry, chunks=[])


def far_chunks(entry: Any) -> Any:
    far = [replace(chunk, offsets=torch.Size([1 << 50] * len(chunk.offsets))) for chunk in entry.chunks]
    return replace(entry, chunks=far)


def no_size(entry: Any) -> Any:
    return replace(entry, size=None)


def no_properties(entry: Any) -> Any:
    return replace(entry, properties=None)


def doubled(entry: Any) -> Any:
    return replace(entry, properties=replace(entry.properties, dtype=torch.float64))


@pytest.mark.parametrize(
    ("part", "change", "fault"),
    [
        ("model.", no_chunks, "are not the whole tensor"),
        ("model.", far_chunks, "are not the whole tensor"),
        ("model.", no_size, "are not the whole tensor"),
        ("model.", no_properties, "are not the whole tensor"),
        ("optimiser.", no_chunks, "are not the whole tensor"),
        ("optimiser.", doubled, r"is torch\.float64 in the checkpoint; expected torch\.float32"),
    ],
)
def test_a_checkpoint_that_lacks_a_part_of_a_tensor_is_refused(
    folder: Path, part: str, change: Callable[[Any], Any], fault: str
) -> None:
    step = folder / "run" / "checkpoints" / STEP
    metadata = FileSystemReader(step).read_metadata()
    for name, entry in metadata.state_dict_metadata.items():
        if name.startswith(part) and not isinstance(entry, BytesStorageMetadata):
            metadata.state_dict_metadata[name] = change(entry)
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(step)
    with pytest.raises(TreepackError, match=fault):
        run_on(folder, folder / "run")
    if part == "model.":
        with pytest.raises(TreepackError, match=fault):
            run_on(folder, folder / "new", init_from=step)
