"""The training step of rollouts whose records have none, from the path of their file.

    rollouts/step_12/train_rollouts.jsonl   run/global_step_12/0.jsonl     out/step=12/part-0.parquet     step 12
    dumps/rollouts_step_12.jsonl            run/iter_12/rollouts.jsonl     rollout_data/12.jsonl of verl

Trainers write the rollouts of each step into a separate folder or file, and number tasks from 0 in each. Without
the step, a group would mix the rollouts of several policies. The file name counts before the folders, and the innermost
folder before the others. Only the path counts that the caller gave, or that a search found below it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import PurePath

from treepack.files.remote.cache import addresses_in
from treepack.trajectory import Outcomes, Tokens, Trajectory

STEP_NOTE = "training step taken from the path"
# Formats of trainers, and of their environments.
_OF_TRAINERS = frozenset(
    """
    art atif harbor-traces megatron-rl nemo-gym nemo-rl prime-rl rllm rllm-gateway skyrl skyrl-dump slime tinker
    tinker-datum token-trees trl-grpo verifiers verifiers-results verl verl-dump
    """.split()
)
# Formats of any data, in which only rollouts with a reward, an advantage or log-probabilities have a step. In logs of
# agents and in data for supervised training, such a folder may be anything: an iteration of an agent, a checkpoint.
_OF_ANY_DATA = frozenset("anthropic-messages chat langsmith openai-chat openai-responses otel-genai tokens".split())
_NUMBERED_FILES = frozenset({"verl-dump"})  # programs that name a file after its step: 12.jsonl
_STEP = r"(?:step|iter|iteration)s?"
_FOLDER = re.compile(rf"(?:{_STEP}[-_= ]?|(?:[a-z]+[-_])+{_STEP}[-_= ])(\d{{1,18}})", re.IGNORECASE)
_FILE = re.compile(rf"(?:^|[-_.]){_STEP}[-_= ]?(\d{{1,18}})(?=$|[-_.])", re.IGNORECASE)
_NUMBER = re.compile(r"(\d{1,18})(?=$|\.)")
_PLACE = re.compile(r"[:\[]")  # begins the place in a file: r.jsonl:17, r.json[3]
_OF_TRIALS = frozenset({"atif"})
_STEPS_OF_TRIAL = "steps"  # a folder of Harbor, in which a trial has a folder for each step of its task


def with_step(
    items: Outcomes,
    format: str,  # noqa: A002
) -> Outcomes:
    """Yield `items` of a file of this format with the step of their path, if they have none; a note counts them."""
    if format not in _OF_TRAINERS and format not in _OF_ANY_DATA:
        yield from items
        return
    for item in items:
        if isinstance(item, Trajectory) and item.step is None and (format in _OF_TRAINERS or _is_scored(item)):
            step = step_of_path(item.source, format)
            if step is not None:
                item = replace(item, step=step, notes=(*item.notes, STEP_NOTE))
        yield item


def step_of_path(path: str, format: str) -> int | None:  # noqa: A002
    """Return the step that a path, or a source such as `path:17`, names for a file of this format, or None."""
    # "s3://bucket/step_3/r.jsonl:17" -> folders "s3:" "bucket" "step_3", file "r.jsonl"
    folder, _, name = path.rpartition("/")
    return _step(folder, _PLACE.split(name, maxsplit=1)[0], format)


@lru_cache(maxsize=1024)
def _step(folder: str, file: str, format: str) -> int | None:  # noqa: A002
    match = None
    if format not in _OF_TRIALS:  # whose folders are named after tasks, and files after agents
        match = _FILE.search(file) or (_NUMBER.match(file) if format in _NUMBERED_FILES else None)
    folders = PurePath(addresses_in(folder)).parts
    for above, inner in reversed(list(zip(("", *folders), folders, strict=False))):
        if match is None and not (format in _OF_TRIALS and above == _STEPS_OF_TRIAL):
            match = _FOLDER.fullmatch(inner)
    return None if match is None else int(match[1])


def _is_scored(item: Trajectory) -> bool:
    known = item.reward is not None or item.advantage is not None
    content = item.content if isinstance(item.content, Tokens) else None
    return known or (content is not None and not (content.advantage is None and content.sampling_logprob is None))
