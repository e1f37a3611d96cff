"""The teacher of a run, loaded beside the model that is trained, with the checks that both have one vocabulary.

options, rows, LoadedModel --load_teacher--> LoadedModel of the teacher, frozen; None if the objective names none
"""

from __future__ import annotations

from contextlib import suppress

import torch

from treepack.carry.refusal import check_carry
from treepack.data.mixture import AnyDataset
from treepack.errors import TreepackError
from treepack.memory.shortage import memory_errors
from treepack.model.accept.saved_tokenizer import saved_tokenizer
from treepack.model.accept.vocabulary import check_same_words
from treepack.model.head.output_head import find_head
from treepack.model.load import load_model
from treepack.model.loaded import LoadedModel
from treepack.sequence.share import share_rows
from treepack.tokenise.tokenization import fingerprint
from treepack.train.options import TrainOptions
from treepack.train.setup.run_model import check_rows_fit


def load_teacher(
    options: TrainOptions, device: torch.device, dtype: torch.dtype, dataset: AnyDataset, student: LoadedModel
) -> LoadedModel | None:
    """Load the frozen teacher that the objective names, whole on this rank; None if it names none.

    Ranks that share the rows of the student share the teacher's too, if its heads can be divided.

    Args:
        options: of the run.
        device: of the run.
        dtype: of the teacher's weights, in which it computes.
        dataset: the rows.
        student: the model that is trained.

    Raises:
        TreepackError: the model is not supported, does not fit the rows, or has another vocabulary than the student.
    """
    source = options.objective.teacher
    if source is None:
        return None
    with memory_errors(
        "while the teacher was loaded", "write its log-probabilities first, by `treepack logprobs --column teacher`"
    ):
        teacher = load_model(source, attention=options.attention, dtype=dtype, device=device, seed=options.seed)
    teacher.model.requires_grad_(False)
    if student.sequence is not None:
        with suppress(TreepackError):  # its heads cannot be divided: each rank computes whole rows
            share_rows(teacher.causal, student.sequence.group)
    check_rows_fit(dataset, teacher)
    _check_same_vocabulary(teacher, student)
    if options.piece_limit is not None:
        check_carry(teacher)
    return teacher


def _check_same_vocabulary(teacher: LoadedModel, student: LoadedModel) -> None:
    """Refuse a teacher with other words than the student, by their tokenizers and the sizes of their laws."""
    pair = [saved_tokenizer(each.source) for each in (teacher, student)]
    marks = [fingerprint(each)["sha256"] for each in pair if each is not None]
    if len(set(marks)) > 1:
        raise TreepackError(
            f"{teacher.source}: its tokenizer is not that of {student.source}, and a distribution over other words "
            "teaches nothing; choose a teacher with the tokenizer of the student"
        )
    words, size = (len(find_head(each.causal).weight) for each in (teacher, student))
    check_same_words(teacher.source, words, student.source, size)
