"""Text that SkyRL writes for its evaluations: one file per data set in `dumped_evals`.

    {"input_prompt": "..", "output_response": "..", "score": 1.0, "stop_reason": "stop", "env_class": "gsm8k",
     "env_extras": {..}, "data_source": ".."}

Both texts were decoded from ids with their special tokens. In the response of an agent, the text of tools and the text
of the model cannot be separated, so all of it is trained.
"""

from __future__ import annotations

from collections.abc import Iterator

from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.rollout_facts import describe
from treepack.ingest.readers.files.records import Record
from treepack.ingest.readers.format import REWARDS, Format
from treepack.ingest.readers.kinds import TEXT
from treepack.trajectory import PromptCompletion, Skipped, Trajectory


def read_skyrl_dump(record: Record, options: ReadOptions) -> Iterator[Trajectory | Skipped]:
    """Read the one trajectory of `record`, whose whole response is trained."""
    value = record.value
    # An empty response has no token to train.
    if not value["output_response"]:
        yield Skipped(record.source, "empty response")
        return
    content = PromptCompletion(value["input_prompt"], value["output_response"])
    yield describe(record, content, used={"input_prompt", "output_response", "env_extras"}, options=options)


FORMAT = Format(
    name="skyrl-dump",
    rank=420,
    program="SkyRL (evaluation dumps)",
    recognised_by="`input_prompt` and `output_response` as text",
    requires=[{"input_prompt": TEXT, "output_response": TEXT}],
    used="input_prompt output_response score stop_reason env_class data_source".split(),
    dropped=("env_extras",),
    keeps={REWARDS},
    read=read_skyrl_dump,
)
