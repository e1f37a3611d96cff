"""Records of Alpaca, `{instruction, input, output, history, system}`, and LLaMA-Factory's pairs of them.

    {"instruction": "Add.", "input": "2 and 3", "output": "5"}       user "Add.\\n2 and 3", assistant "5"
    {"instruction": "Add.", "chosen": "5", "rejected": "6"}          a pair
    "history": [["2 + 2?", "4"]]                                     earlier rounds, which are trained too

If a record has no other reward, `kto_tag` (true or false) is the reward. It is that of the output; then earlier rounds
are not trained.
"""

from __future__ import annotations

from treepack.formats.kit import Format, Outcomes, ReadOptions, Record, Skipped, as_text
from treepack.ingest.readers.messages.sft_messages import read_conversation, read_pair, rounds

# The fields that become messages. `tools` and `kto_tag` are read by `sft_messages`, as for every format of chats.
_USED = frozenset({"instruction", "input", "output", "history", "system"})
_PAIR = frozenset({"chosen", "rejected"})


def _read_alpaca(record: Record, options: ReadOptions) -> Outcomes:
    """Read the one conversation of `record`, or the two of a pair.

    Raises:
        TreepackError: `input` is not text, or the history is not made of rounds.
    """
    value, source = record.value, record.source
    details = as_text(value.get("input"), source=source, name="input", default="")
    # "Add." and "2 and 3" -> "Add.\n2 and 3", as in the template of Alpaca
    query = f"{value['instruction']}\n{details}" if details else value["instruction"]
    prompt = rounds(value.get("system"), value.get("history"), query, None, source=source)
    if isinstance(value.get("chosen"), str) and isinstance(value.get("rejected"), str):
        # Without tools, a pair of texts becomes a pair of one message each.
        chosen, rejected = ([{"role": "assistant", "content": value[name]}] for name in ("chosen", "rejected"))
        yield from read_pair(record, prompt, chosen, rejected, options, used=_USED | _PAIR)
        return
    if not value["output"]:
        yield Skipped(source, "no output")
        return
    yield read_conversation(record, [*prompt, {"role": "assistant", "content": value["output"]}], options, used=_USED)


FORMAT = Format(
    name="alpaca",
    rank=290,
    program="Stanford Alpaca; LLaMA-Factory, ms-swift and Axolotl read it",
    recognised_by="`instruction` and `output`, or `instruction`, `chosen` and `rejected`, as text",
    requires="instruction:text, output:text; instruction:text, chosen:text, rejected:text",
    used="instruction input output history system tools chosen rejected kto_tag",
    keeps="rewards",
    read=_read_alpaca,
)
