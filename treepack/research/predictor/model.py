"""The prefix value predictor: a backbone with a scalar head, its files, and its values on rows of prefixes.

    out/ --load_values--> ValueModel
    ValueModel, AnchorRow --end_states--> [n, D] --values_of_states--> [n]      values in 0 .. 1
    ValueModel, PredictionData --predict_values--> a table, in the format of `research.trace.predictions`

    out/config.json, model.safetensors   the backbone, as its source has it; its output layer is not trained
    out/head.safetensors                 weight [1, D], bias [1]
    out/metrics.jsonl                    a line per optimiser step
    out/values.json                      written last: format, options, tokenizer, hash of every file

V(h) = sigmoid(w . s + b), TRACE (arXiv 2606.11119) eq. 17: s is the hidden state of a causal language model, after its
final norm, at the last token of the prefix h. `predictor.fit` fits the predictor, `predictor.rows` makes its rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from treepack import __version__
from treepack.attention import row_multiple
from treepack.carry.backward import runner_of
from treepack.carry.offload import CarryMemory
from treepack.data.batch import make_batch
from treepack.errors import TreepackError
from treepack.files.manifest import check_part, file_sha256
from treepack.files.manifest_entries import TokenizerEntry
from treepack.files.model_source import local_source
from treepack.fit.rung import RunPlan
from treepack.memory.shortage import memory_errors
from treepack.model.accept.compatibility import check_fits
from treepack.model.accept.vocabulary import CONFIG_FILE
from treepack.model.adapters.adapter import is_adapted
from treepack.model.forward import hidden_states, prepare_batch
from treepack.model.head.value_head import ValueHead, lent_head
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel
from treepack.model.saved_files import copied_files, with_model, write_files
from treepack.model.weights.writing import converted_weights, saved_weights
from treepack.pack.row import Row
from treepack.research.predictor.prediction_data import PredictionData, prediction_table
from treepack.research.predictor.record import FORMAT, HEAD, METRICS, RECORD, VERSION, read_values_record
from treepack.research.predictor.rows import AnchorRow
from treepack.train.forward_passes import ForwardPasses
from treepack.train.options import CHUNK
from treepack.train.ranks import find_device
from treepack.train.setup.compute import ComputeSetting
from treepack.trajectory import Float64


@dataclass(frozen=True)
class ValueModel:
    """A backbone and its head, a critic's value head, whose values are the logits of success.

    The head is not a part of the backbone, which is saved and computed without it.
    `record` is the content of values.json; it is empty if the predictor was not read from a directory.
    """

    loaded: LoadedModel
    head: ValueHead
    record: dict[str, Any] = field(default_factory=dict)


def _new_head(loaded: LoadedModel) -> ValueHead:
    """Return a head that gives every prefix the value 0.5, in the dtype and on the device of the model's weights."""
    # Zeros, because a random direction would rank prefixes before any of them was seen. The first update gives the head
    # a direction, and from the second update on gradients reach the backbone.
    weight = loaded.model.get_input_embeddings().weight
    return ValueHead(loaded.model.config.get_text_config().hidden_size, weight.dtype).to(weight.device)


def end_states(loaded: LoadedModel, row: AnchorRow, *, dtype: str = "fp32") -> Tensor:
    """Return the hidden states [n, D] at the ends of the prefixes of a row; each token of the row is computed once."""
    batch = prepare_batch(loaded, make_batch(row.row, multiple=row_multiple(loaded.attention)))
    with torch.autocast(loaded.device.type, torch.bfloat16, enabled=dtype == "bf16"):
        states = loaded.compute(lambda: hidden_states(loaded, batch))
    # states [padded length, D]; padding is at the end, so the row's own indices are valid
    return states[torch.from_numpy(row.token).to(loaded.device)]


def row_memory_errors(row: AnchorRow) -> AbstractContextManager[None]:
    """Turn a lack of memory for `row` into a TreepackError that suggests options."""
    return memory_errors(
        f"in a row of {row.row.num_tokens:,} tokens",
        "give a smaller --capacity, --dtype bf16, or for a fit --checkpoint-layers all",
    )


def values_of_states(head: ValueHead, states: Tensor) -> Tensor:
    """Return the values [n] in 0 .. 1 of hidden states [n, D], float32 or float64: equation 17."""
    return torch.sigmoid(head(states, torch.arange(len(states), device=states.device)))


def check_rows(model: ValueModel, rows: Sequence[AnchorRow], tokenizer: TokenizerEntry | None, trie: Path) -> None:
    """Refuse rows of `trie` that the model cannot compute exactly, and another `tokenizer` than that of the fit.

    Raises:
        TreepackError: as `model.accept.compatibility.check_fits`, and if the tokenizers differ.
    """
    fit_tokenizer = model.record.get("tokenizer")
    if fit_tokenizer is not None and tokenizer is not None and fit_tokenizer["sha256"] != tokenizer["sha256"]:
        raise TreepackError(
            f"{trie}: was tokenised by {tokenizer['name']} and the predictor was fitted on tokens of "
            f"{fit_tokenizer['name']}; build the trie with that tokenizer"
        )
    check_fits(
        model.loaded,
        max_token_id=max(int(row.row.input_ids.max()) for row in rows),
        tokenizer=tokenizer,
        max_position=max(int(row.row.position_ids.max()) for row in rows),
    )


def save_values(model: ValueModel, directory: Path, entries: dict[str, Any]) -> None:
    """Write backbone and head into `directory`, and the record last: `entries` with format, versions and hashes."""
    from safetensors.torch import save_file

    backbone = model.loaded.causal
    write_files(with_model(copied_files(model.loaded.source, (CONFIG_FILE,)), backbone), directory)
    (saved_weights(backbone) or converted_weights(backbone)).write(directory)
    save_file({name: value.cpu().contiguous() for name, value in _tensors(model.head).items()}, directory / HEAD)
    # The metrics are not hashed: they have the seconds of each step, and equal fits must have equal records.
    files = sorted(path for path in directory.iterdir() if path.name != METRICS)
    hashed = [{"name": path.name, "bytes": path.stat().st_size, "sha256": file_sha256(path)} for path in files]
    record = {"format": FORMAT, "version": VERSION, "treepack": __version__, **entries, "files": hashed}
    (directory / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def start_values(source: str | Path, dtype: str, attention: str, device: torch.device, seed: int) -> ValueModel:
    """Load the model from which a fit starts: an earlier predictor, or a causal language model with a new head.

    Raises:
        TreepackError: as `model.load.load_model` and `load_values`.
    """
    local = local_source(source)
    if (Path(local) / RECORD).exists():
        return load_values(local, dtype=dtype, attention=attention, device=str(device))
    lower = torch.bfloat16 if dtype == "bf16" else None
    loaded = load_model(source, attention=attention, autocast=lower, device=device, seed=seed)
    if is_adapted(loaded.model):
        raise TreepackError(f"{source}: is an adapter; fit a whole model, which `treepack train --merge` writes")
    return ValueModel(loaded, _new_head(loaded))


def load_values(
    directory: str | Path, *, dtype: str = "fp32", attention: str = "auto", device: str = "auto"
) -> ValueModel:
    """Load a predictor that `predictor.fit` wrote, with float32 weights; options as in `train.options.TrainOptions`.

    Raises:
        TreepackError: `directory` has no predictor, or one of its files is missing or was altered.
    """
    from safetensors.torch import load_file

    path = Path(directory)
    record = read_values_record(path)
    for entry in record["files"]:  # before any file is read as a model
        check_part(path, entry)
    lower = torch.bfloat16 if dtype == "bf16" else None
    loaded = load_model(path, attention=attention, autocast=lower, device=find_device(device))
    head, tensors = _new_head(loaded), load_file(path / HEAD)
    if {name: value.shape for name, value in tensors.items()} != {n: v.shape for n, v in _tensors(head).items()}:
        raise TreepackError(f"{path / HEAD}: does not fit the model in the same directory; fit the predictor again")
    head.load_state_dict(tensors)
    return ValueModel(loaded, head, record)


def _tensors(head: ValueHead) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in sorted(head.state_dict().items())}


@torch.no_grad()
def node_values(model: ValueModel, rows: Sequence[AnchorRow], *, num_inner: int, dtype: str = "fp32") -> Float64:
    """Return the value of every node whose prefix ends in one of `rows`, float64 [num_inner]; NaN for other nodes.

    Raises:
        TreepackError: a value is not finite, or memory is too small.
    """
    values = np.full(num_inner, np.nan)  # each node ends in one row, so no value is written twice
    ends = {row.row.row_id: row for row in rows}
    loaded, head = model.loaded, model.head

    def compute(joined: Sequence[Row], plan: RunPlan, memory: CarryMemory | None) -> list[Float64]:
        row = ends[joined[0].row_id]
        if plan.carry is None or row.row.num_tokens <= plan.carry:
            return [values_of_states(head, end_states(loaded, row, dtype=dtype)).double().cpu().numpy()]
        lower = ComputeSetting(loaded.device, dtype).lower_precision
        with lent_head(loaded.causal, head):
            batch = make_batch(row.row)
            after = runner_of(loaded, batch, plan.carry, memory=memory, autocast=lower).values(batch)
        return [torch.sigmoid(after.cpu()[torch.from_numpy(row.token)]).double().numpy()]

    passes = ForwardPasses(loaded, RunPlan(False, 0, False, None, 1, CHUNK))  # every row alone
    for each, row_values in passes.results([row.row for row in rows], compute):
        if not np.isfinite(row_values).all():
            raise TreepackError(f"{loaded.source}: a value of row {each.row_id} is not finite; fit the predictor again")
        values[ends[each.row_id].node] = row_values
    return values


def predict_values(model: ValueModel, data: PredictionData, *, dtype: str = "fp32") -> pa.Table:
    """Return the values of all prompts and prefixes of a trie as a table, see `prediction_data.prediction_table`.

    Raises:
        TreepackError: the trie has another tokenizer, or the model does not fit the data.
    """
    check_rows(model, data.rows, data.tokenizer, data.path)
    values = node_values(model, data.rows, num_inner=data.ends.tree.num_inner, dtype=dtype)
    return prediction_table(data.trie, data.ends, values)
