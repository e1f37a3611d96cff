"""run.json and train.json of a run as they are read: the refusals that need no torch, before a run is opened.

    out --check_out--> refuses an output that exists, unless it is replaced or resumed
    run.json, record of the new run --refuse_differences--> one sentence with every option that differs

`run_directory` writes both files; its header describes the directory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from treepack.errors import TreepackError
from treepack.files.directory import RUN, is_own_directory, refuse_existing
from treepack.files.manifest_entries import FileEntry
from treepack.files.remote.address import AnyPath
from treepack.files.remote.stored_files import is_stored, read_stored
from treepack.model.adapters.lora_options import LoraOptions
from treepack.objectives.objective import Objective
from treepack.train.options import LENGTH_OPTIONS, TrainOptions

FORMAT = "treepack-train"
VERSION = 2
FINISHED = "train.json"

# Entries that must be equal, with the names that a user has for them.
_ENTRIES = {
    "format": "the format",
    "version": "the version of run.json",
    "packed_sha256": "PACKED",
    "eval_sha256": "--eval",
    "config_sha256": "the config of --model",
    "loss_package": "the package of --loss",
}
# Entries that a run may not have: of held-out rows, and of a loss of a different package.
_OPTIONAL = ("eval_sha256", "loss_package")

# Names of options, as `_flat_options` gives them.
_OPTIONS = {field.name for options in (TrainOptions, Objective) for field in fields(options)}
_OPTIONS |= {name if name in ("quantize", "merge") else f"lora_{name}" for name in asdict(LoraOptions())}


# Options of the loss that a run does not read, or that the version that started it did not have yet.
_USUAL = {field.name: field.default for field in fields(Objective)} | {"loss_constants": {}, "old_logprobs": "recorded"}


def check_out(out: AnyPath, *, inputs: Iterable[str | AnyPath], overwrite: bool, resume: bool) -> None:
    """Refuse an `out` that a run with these `inputs` must not write to; to be called before anything is loaded.

    Raises:
        TreepackError: `out` contains an unfinished run, a finished run, other files, or an input.
    """
    started = is_stored(out / RUN)
    if resume and started:
        return  # `refuse_differences` compares the runs
    if resume and isinstance(out, Path) and is_own_directory(out):
        raise TreepackError(f"{out} has no run to continue; choose another --out")
    if not overwrite and started and not is_finished(out):
        raise TreepackError(
            f"{out} contains a run that is not complete; continue it with --resume or replace it with --overwrite"
        )
    refuse_existing(out, overwrite=overwrite, inputs=inputs)


def is_finished(out: AnyPath) -> bool:
    """Return true if the model in `out` is complete."""
    return is_stored(out / FINISHED)


def finished_record(out: AnyPath) -> dict[str, Any]:
    """Return train.json of the complete model in `out`, or {}.

    Raises:
        TreepackError: it is damaged.
    """
    return read_run_record(out / FINISHED) if is_finished(out) else {}


def steps_done(record: Mapping[str, Any]) -> int:
    """Return the steps in a record of `finished_record`; a run that its patience ended has fewer than planned."""
    return int(record.get("last_step", record.get("num_steps", 0)))


def refuse_fewer_steps(out: AnyPath, done: int, num_steps: int) -> None:
    """Refuse a run of `num_steps` steps that continues one of which `done` steps are done.

    Raises:
        TreepackError: with both numbers.
    """
    if done > num_steps:
        raise TreepackError(
            f"{out}: {done} steps are done and this run has {num_steps}; give --steps of at least {done}, or start a "
            "new --out"
        )


def already_finished(out: AnyPath) -> str:
    """Return the note about a run whose model is complete."""
    record = finished_record(out)
    done = steps_done(record)
    option = "--patience" if done < record.get("num_steps", 0) else "--steps"
    return f"{out} is already finished, with {done} steps; {option} with a larger number trains on"


def refuse_differences(out: AnyPath, now: Mapping[str, Any], *, unknown: Collection[str] = ()) -> None:
    """Refuse to resume in `out` a run that differs from the one that started there, naming all differences.

    Args:
        out: the directory, with a run.json.
        now: the record of the new run.
        unknown: names of entries and of options that are not compared, because the new run has not chosen them yet.

    Raises:
        TreepackError: run.json is damaged, or data, configuration or options differ.
    """
    path = out / RUN
    before = read_run_record(path)
    try:
        before = {**dict.fromkeys(_OPTIONAL), **before}
        pairs = [(name, before[name], now.get(name)) for name in _ENTRIES if name not in unknown]
        different = [_changed_entry(*pair) for pair in pairs if pair[1] != pair[2]]
        # Both sides must have JSON types, in which a tuple is a list: (0.9, 0.95) -> [0.9, 0.95].
        old, new = _flat_options(before["options"]), _flat_options(json.loads(json.dumps(now["options"])))
        for name in sorted({*old, *new} - LENGTH_OPTIONS - set(unknown)):
            if old.get(name) != new.get(name):
                different.append(_changed_option(name, old.get(name), new.get(name)))
    except (KeyError, TypeError, AttributeError) as error:
        raise TreepackError(f"{path}: is damaged ({error}); remove {out} and start again") from error
    if different:
        remedy = f"restore {'it' if len(different) == 1 else 'them'}"
        if any(value is not None for name, value in old.items() if name not in _OPTIONS):
            remedy = f"continue with treepack {before.get('treepack')}, which started it"
        raise TreepackError(f"{out}: cannot resume: {'; '.join(different)}; {remedy}, or start a new --out")


def _changed_entry(name: str, old: Any, new: Any) -> str:
    """Return a phrase for an entry of `_ENTRIES` that differs."""
    if name == "eval_sha256" and None in (old, new):
        before, now = ("not given" if value is None else "given" for value in (old, new))
        return f"{_ENTRIES[name]} was {before} when the run started and is {now} now"
    if name.endswith("_sha256"):
        return f"{_ENTRIES[name]} has a different content than when the run started"
    return f"{_ENTRIES[name]} was {old!r} when the run started and is {new!r} now"


def _flat_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by the names of the command line: {"lora": {"rank": 8}, ...} -> {"lora_rank": 8, ...}."""
    plain = {name: value for name, value in options.items() if name not in ("lora", "objective")}
    return {"blocks": 1, **plain, **_USUAL, **options["objective"], **lora_options(options.get("lora"))}


def lora_options(lora: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options of an adapter by the names of the command line: {"rank": 8} -> {"lora_rank": 8, ...}."""
    values = asdict(LoraOptions()) | dict(lora or {})
    return {name if name in ("quantize", "merge") else f"lora_{name}": value for name, value in values.items()}


def _changed_option(name: str, old: Any, new: Any) -> str:
    option = f"--{name.replace('_', '-')}"
    before, now = ("not given" if value is None else repr(value) for value in (old, new))
    if name not in _OPTIONS:
        return f"{option} was {before} when the run started, and this treepack has no such option"
    return f"{option} was {before} when the run started and is {now} now"


def package_entry(options: TrainOptions) -> dict[str, str]:
    """Return the entry with name and version of the package that has the loss; {} for a loss of treepack."""
    package = options.objective.definition.package
    return {} if package is None else {"loss_package": package}


def files_sha256(entries: Iterable[FileEntry]) -> str:
    """Return a hash of the parts in a manifest, which has the hash of each: it identifies rows without reading them."""
    return text_sha256("".join(entry["sha256"] for entry in entries))


def text_sha256(text: str) -> str:
    """Return the sha256 of a text in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_run_record(path: AnyPath) -> dict[str, Any]:
    """Return the object in run.json or train.json.

    Raises:
        TreepackError: it is damaged.
    """
    try:
        record: dict[str, Any] = json.loads(read_stored(path) or b"")
        options = record.get("options") if isinstance(record, dict) else None
        is_whole = isinstance(options, dict) and options.keys() >= LENGTH_OPTIONS
        if not is_whole or any(type(record.get(name, 0)) is not int for name in ("num_steps", "last_step")):
            raise ValueError("no record of a run")
    except (OSError, ValueError, RecursionError) as error:
        remedy = "remove it and resume the run" if path.name == FINISHED else f"remove {path.parent} and start again"
        raise TreepackError(f"{path}: is damaged ({error}); {remedy}") from error
    return record
