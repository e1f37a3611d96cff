"""The files that a run saves beside its weights, collected and read back before its first step.

    LoadedModel, its source --collect_files--> {"config.json": b"...", "tokenizer.json": b"...", ...}, notes
    first rows of the run   --_end_tokens----> the special tokens in which trained answers end

A whole model gets all files of its source. A new adapter gets the tokenizer of its base, and an adapter that trains on
keeps its own files. A model without a tokenizer gets the one that made the data.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from treepack.errors import TreepackError
from treepack.files.manifest_entries import TemplateEntry
from treepack.files.model_source import NOT_THE_MODEL
from treepack.model.accept.saved_tokenizer import NAMES_OF_TOKENIZERS
from treepack.model.accept.vocabulary import CONFIG_FILE
from treepack.model.adapters.adapter import adapter_base, check_adapter, find_adapter, is_adapted
from treepack.model.head.value_head import without_value_head
from treepack.model.load import build_empty, read_config
from treepack.model.loaded import LoadedModel
from treepack.model.saved_files import (
    GENERATION_FILE,
    TOKENIZER_FILES,
    check_files,
    copied_files,
    read_files,
    with_end_tokens,
    with_model,
    write_files,
)
from treepack.model.text_half import is_text_half
from treepack.model.weights.writing import check_weights
from treepack.tokenise.saved_template import is_template_of, recorded_tokenizer, write_template
from treepack.tokenise.tokenization import load_tokenizer
from treepack.train.options import TrainOptions
from treepack.train.setup.run_data import RunData

_ROWS = 16  # rows whose answers are searched for end tokens; their order is random
_SHARE = 0.1  # of the answers that end in a token; a cut answer may end in any token


def collect_files(
    loaded: LoadedModel, options: TrainOptions, data: RunData
) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Return the files of the saved model by name, and notes; see the module's description.

    Raises:
        TreepackError: a file cannot be read, or transformers could not write the weights or read the files again.
    """
    source, adapted = loaded.source, is_adapted(loaded.model)
    base = adapter_base(loaded.model) if adapted else source
    whole = not adapted or (options.lora is not None and options.lora.merge)
    files: dict[str, bytes] = {}
    if whole:
        files = with_model(copied_files(base), loaded.causal)
        _check_weights(loaded, base)
    elif find_adapter(source) is not None:
        files = copied_files(source, but=NOT_THE_MODEL)
    if adapted:
        with without_value_head(loaded.causal):
            check_adapter(loaded.model, source)
    manifest, tokenizer, notes = data.dataset.manifest, None, tuple[str, ...]()
    made_by, template = recorded_tokenizer(manifest, data.dataset.path), manifest.get("chat_template")
    try:
        files = _with_tokenizer(files, [source, base, *([] if made_by is None else [made_by])])
        files, tokenizer, notes = _read_tokenizer(files, template)
    except TreepackError as error:
        notes = (f"no tokenizer is saved with the model: {error}",)
    check_files(files, source)
    ends = {} if tokenizer is None else _end_tokens(data, tokenizer)
    stops = files if whole else copied_files(base, (CONFIG_FILE, GENERATION_FILE))
    stops, new = with_end_tokens(stops, ends)
    if new:
        words = " and ".join(repr(ends[token]) for token in new)
        remedy = f"the saved {GENERATION_FILE} adds it" if whole else "give it to the engine as a stop token"
        notes = (*notes, f"trained answers end in {words}, at which generation with the model does not stop: {remedy}")
    return stops if whole else files, notes


def _check_weights(loaded: LoadedModel, base: str) -> None:
    """Refuse a model whose weights transformers could not convert for a checkpoint."""
    if is_adapted(loaded.model):
        model = build_empty(base, read_config(base)[0], torch.float32)
    else:
        model = loaded.causal
    if not is_text_half(model):  # `whole_checkpoint.check_savable` was called when it was loaded
        with without_value_head(model):
            check_weights(model, base)


def _with_tokenizer(files: dict[str, bytes], sources: Sequence[str]) -> dict[str, bytes]:
    """Return `files` with the tokenizer of the first source that has one, and without files of others."""
    for source in sources:
        found = copied_files(source, TOKENIZER_FILES)
        if any(name in found for name in NAMES_OF_TOKENIZERS):
            rest = {
                name: content
                for name, content in files.items()
                if not any(fnmatch(name, each) for each in TOKENIZER_FILES)
            }
            return {**rest, **found}
    return files


def _read_tokenizer(
    files: dict[str, bytes], template: TemplateEntry | None
) -> tuple[dict[str, bytes], Any, tuple[str, ...]]:
    """Return the files with the chat template of the data, the tokenizer in them, None if they have none, and notes.

    Raises:
        TreepackError: transformers cannot load the tokenizer.
    """
    tokenizer, notes = None, tuple[str, ...]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(files, folder)
        if any(name in files for name in NAMES_OF_TOKENIZERS):
            tokenizer = load_tokenizer(str(folder))
        if template is not None:
            if tokenizer is not None and not is_template_of(tokenizer.chat_template, template):
                own = "has another one" if tokenizer.chat_template else "has none"
                made_by = f"the data was made with the chat template {template['name']}"
                notes = (f"{made_by}, and the model's tokenizer {own}; it is saved with that of the data",)
            write_template(folder, template)
            files = read_files(folder)
    return files, tokenizer, notes


def _end_tokens(data: RunData, tokenizer: Any) -> dict[int, str]:
    """Return the special tokens that end answers in the first rows of the run, by id and ascending."""
    rows = [row for step in data.schedule for row in step.rows]
    if data.division is not None:  # rows that this machine reads anyway
        own = set(data.division.rows_of(0).tolist())
        rows = [row for row in rows if row in own]
    ends: Counter[int] = Counter()
    for row in dict.fromkeys(rows[:_ROWS]):
        batch = data.dataset[row]
        # Trained tokens 1, 2, 4 of a row in which 4 is below 2: no trained token is below 1 or 4.
        trained = batch.loss_weight != 0
        count = torch.cat([torch.zeros(1, dtype=torch.int64), trained.cumsum(0)])
        place = torch.arange(len(trained))
        last = trained & (count[batch.subtree_end.long()] == count[place + 1])
        ends.update(batch.input_ids[last].tolist())
    special = {token: added.content for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return {token: special[token] for token in sorted(ends.keys() & special) if ends[token] >= _SHARE * ends.total()}
