"""Text that verl's trainer writes next to its metrics: `<step>.jsonl` of `rollout_data_dir`.

    {"input": "..", "output": "..", "gts": "42", "score": 1.0, "step": 5, "acc": true}

Both texts were decoded from ids without their special tokens. The ends of turns are lost, so neither the ids nor the
text that the model saw can be restored. In the output of an agent, the text of tools and the text of the model cannot
be separated. If the exact ids were kept, read those instead. Without a `step`, the name of the file is the step.
"""

from __future__ import annotations

from collections.abc import Iterator

from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.rollout_facts import describe
from treepack.ingest.readers.files.records import Record
from treepack.ingest.readers.format import REWARDS, Format
from treepack.ingest.readers.kinds import ANY, TEXT
from treepack.trajectory import PromptCompletion, Skipped, Trajectory

# Counted once per record, so that a user notices that a better source may exist.
DECODED_NOTE = "text of verl's dump, decoded without special tokens"


def read_verl_dump(record: Record, options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    """Read the one trajectory of `record`, whose whole output is trained."""
    value = record.value
    # An empty response has no token to train.
    if not value["output"]:
        yield Skipped(record.source, "empty response")
        return
    content = PromptCompletion(value["input"], value["output"])
    yield describe(record, content, used={"input", "output"}, options=options, notes=(DECODED_NOTE,))


FORMAT = Format(
    name="verl-dump",
    rank=270,
    program="verl (rollout_data_dir, validation_data_dir)",
    recognised_by="`input` and `output` as text beside `score` and `step` or `gts`",
    requires=[{"input": TEXT, "output": TEXT, "score": ANY, ("step", "gts"): ANY}],
    used="input output gts score step".split(),
    keeps={REWARDS},
    read=read_verl_dump,
)
