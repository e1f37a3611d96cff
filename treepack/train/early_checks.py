"""Refusals of wrong input that need no torch, so that a command makes them before it imports torch.

    packed, model, options --check_training--> paths, manifests, columns, shares, vocabulary
    packed, options, out   --check_resumed-->  everything that may not differ, without the model
    packed | trie, model   --check_scoring, check_trie_model-->  the same for other commands

Each check is the function that opening a run calls again, or a part of it: what is wrong here would be wrong there. A
large model takes minutes to load, and importing torch takes seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treepack.costs.model_cost import language_model, num_experts
from treepack.costs.model_fields import check_scans
from treepack.data.packed_header import PackedHeader, join_manifests, read_header, shared_origin
from treepack.errors import TreepackError
from treepack.files import schema
from treepack.files.directory import RUN
from treepack.files.manifest import read_manifest
from treepack.files.remote.address import AnyPath, as_path, is_address
from treepack.files.remote.hub import refuse_missing
from treepack.files.remote.stored_files import is_stored
from treepack.model.accept.vocabulary import (
    ADAPTER_FILE,
    CONFIG_FILE,
    check_same_words,
    check_vocabulary,
    find_config,
    is_adapter,
)
from treepack.model.adapters.lora_options import require_packages
from treepack.model.experts.division import check_share
from treepack.model.stored_weights import check_stored
from treepack.objectives.needed_columns import check_needed_columns
from treepack.pack.files import training_steps
from treepack.train.input_checks import check_launched, check_mix, check_shared_rows, check_terms
from treepack.train.options import LENGTH_OPTIONS, TrainOptions, stored_use
from treepack.train.saving.run_record import (
    FORMAT,
    VERSION,
    files_sha256,
    finished_record,
    package_entry,
    refuse_differences,
    refuse_fewer_steps,
    steps_done,
)


def check_training(
    packed: Sequence[str | AnyPath], model: str, options: TrainOptions, *, held_out: Sequence[str | AnyPath] = ()
) -> tuple[list[PackedHeader], list[PackedHeader]]:
    """Refuse data, a model and options that cannot be trained; return the headers of both data sets.

    Raises:
        TreepackError: a path, manifest, part, column or share is missing or wrong, or the model lacks a token id.
    """
    check_launched(options.ranks_of_row, options.ranks_of_experts)
    check_mix(options.mix, len(packed))
    headers, others = _read_headers(packed), _read_headers(held_out)
    shared_origin([*headers, *others])
    for each in (headers, others):
        check_needed_columns(each, options.objective)
    if options.mix is not None:
        steps = [step for each in headers for step in training_steps(as_path(each.path), each.manifest)]
        check_shared_rows(", ".join(str(each.path) for each in headers), has_steps=bool(steps))
    if options.init_from is not None and not is_address(options.init_from):
        refuse_missing(options.init_from, kind="model", files=(CONFIG_FILE, RUN, "checkpoint.json", ADAPTER_FILE))
        if not Path(options.init_from).exists() or Path(options.init_from, CONFIG_FILE).exists():
            found = find_config(options.init_from) or {}
            check_stored(options.init_from, found, trained=True, dequantize=options.dequantize)
    adapted = is_adapter(model)
    if options.lora is not None or adapted:
        require_packages(quantize=options.lora is not None and options.lora.quantize is not None)
    if options.lora and options.lora.rank is None and Path(model).exists() and not adapted:
        raise TreepackError(f"{model}: contains no adapter to train; give lora_rank for a new one")
    max_token_id = max(each.manifest["max_token_id"] for each in (*headers, *others))
    stored = stored_use(options, adapted=adapted)
    size = _check_model(model, max_token_id, expert_ranks=options.ranks_of_experts, **stored)
    teacher = options.objective.teacher
    if teacher is not None and (words := _check_model(teacher, max_token_id)) and size:
        check_same_words(teacher, words, model, size)
    return headers, others


def check_resumed(
    headers: Sequence[PackedHeader],
    held_out: Sequence[PackedHeader],
    model: str,
    options: TrainOptions,
    out: AnyPath,
) -> bool:
    """Refuse to continue the run in `out`, if there is one, with different rows or options; the model is not compared.

    Return True if that run is finished and no other was asked for.

    Raises:
        TreepackError: as `run_record.refuse_differences`, or more than `options.steps` are finished.
    """
    if not is_stored(out / RUN):
        return False
    now: dict[str, Any] = {"format": FORMAT, "version": VERSION, "options": options.fixed_options}
    now |= package_entry(options)
    for name, each in (("packed_sha256", headers), ("eval_sha256", held_out)):
        if each:
            now[name] = files_sha256(entry for header in each for entry in header.manifest["files"])
    unknown = {"config_sha256"}
    unknown |= {"dtype"} if options.dtype == "auto" else set()
    unknown |= {"blocks"} if options.blocks is None else set()
    unknown |= {"old_logprobs"} if options.objective.old_logprobs == "auto" else set()
    refuse_differences(out, now, unknown=unknown)
    record = finished_record(out)
    done = steps_done(record)
    refuse_fewer_steps(out, done, options.steps or done)
    if not done:
        return False
    # Another path to the same model, or another way to give the same steps, opens the run, which finds that out.
    lengths = {name: getattr(options, name) for name in LENGTH_OPTIONS}
    return record.get("model") == model and lengths.items() <= record["options"].items()


def check_scoring(packed: str | AnyPath, model: str) -> None:
    """Refuse rows and a model whose log-probabilities cannot be computed.

    Raises:
        TreepackError: a path or manifest is wrong, the rows have no terms, or the model lacks a token id.
    """
    header = read_header(packed)
    check_terms(header)
    _check_model(model, header.manifest["max_token_id"])


def check_trie_model(trie: str | AnyPath, model: str) -> None:
    """Refuse a trie and a model that do not fit together.

    Raises:
        TreepackError: a path or manifest is wrong, or the model lacks a token id.
    """
    _check_model(model, read_manifest(trie, schema.TRIE_FORMAT)["max_token_id"])


def _read_headers(paths: Sequence[str | AnyPath]) -> list[PackedHeader]:
    headers = [read_header(path) for path in paths]
    if len(headers) > 1:
        join_manifests(headers)
    return headers


def _check_model(model: str, max_token_id: int, *, expert_ranks: int = 1, **stored: Any) -> int | None:
    """Refuse a path without a model, a vocabulary without `max_token_id`, and experts that the ranks cannot share.

    `stored` are arguments of `check_stored`, which refuses quantised weights.
    Return the size of the vocabulary, None if the config is at an address or does not give it.
    """
    config = find_config(model)
    if config is None:
        return None
    check_stored(model, config, **stored)
    fields = language_model(config)
    check_scans(model, fields.get("model_type"))
    if expert_ranks > 1 and (experts := num_experts(fields)):
        check_share(experts, expert_ranks, model)
    size = fields.get("vocab_size")
    if type(size) is not int:
        return None
    check_vocabulary(model, max_token_id, size)
    return size
