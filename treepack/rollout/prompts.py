"""The prompt of a record as token ids.

    {"prompt_token_ids": [1, 5, 9]}                       the ids as they are
    {"messages": [...], "tools": [...]}                   rendered by the chat template, with its generation prompt
    {"prompt": [...]}                                     the same
    {"prompt": "2 + 2 = "}                                tokenised without a template

The prompt of a rollout that is built again from its messages has the same ids, because `treepack build-trie` renders
and tokenises with the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from treepack.calls.chat_records import read_chat
from treepack.errors import TreepackError
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields import token_fields as tf
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.values import is_messages
from treepack.tokenise.chat_template import ChatTemplate
from treepack.tokenise.encoder import Encoder
from treepack.tokenise.template.rendering import TemplateFile, Tools
from treepack.trajectory import Chat, Int32, as_token_ids, derived_group, prompt_messages

_TALK_FIELDS = ("messages", "prompt", "system", "tools", "chat_template_kwargs")
# Beside ids without a name for prompts, these fields mean a whole rollout, or padding.
_NOT_A_PROMPT = {tf.RESPONSE, tf.MASK, tf.LABELS, tf.RESPONSE_LENGTH, tf.LENGTHS, tf.ATTENTION, tf.PROMPT_MASK}


@dataclass(frozen=True, slots=True)
class _PromptTokens:
    """A prompt, int32 [n] with n >= 1, and the group of a record that names none."""

    ids: Int32
    group_id: str


@dataclass(slots=True)
class PromptReader:
    """Read prompts; `tokenizer` is a fast tokenizer of transformers, None if all records have token ids.

    `template` replaces the chat template of the tokenizer. `tools` are schemas for conversations that have none.
    """

    tokenizer: Any = None
    template: TemplateFile | None = None
    tools: Tools = None
    _encoder: Encoder | None = field(default=None, init=False)
    _renderer: ChatTemplate | None = field(default=None, init=False)

    def read(self, record: Record) -> _PromptTokens | None:
        """Return the prompt of `record`, None if it has none.

        Raises:
            TreepackError: an empty or malformed prompt, or text without a tokenizer.
        """
        value, source = record.value, record.source
        fields = tf.sort_fields(value, source)
        if fields.get(tf.PROMPT) or fields.get(tf.IDS):
            ids = _token_ids(fields, source)
            prompt = _PromptTokens(ids, derived_group(ids.astype("<i4", copy=False).tobytes()))
        elif isinstance(value.get("prompt"), str) and value.get("messages") is None:
            prompt = self._of_text(value["prompt"], source)
        elif is_messages(value.get("messages")) or is_messages(value.get("prompt")):
            prompt = self._of_chat(record)
        else:
            return None
        if len(prompt.ids) == 0:
            raise TreepackError(f"{source}: has an empty prompt; expected at least one token")
        return prompt

    def _of_text(self, text: str, source: str) -> _PromptTokens:
        encoder = self._loaded(source)
        return _PromptTokens(np.concatenate([encoder.prefix, encoder.encode(text)]), derived_group(text.encode()))

    def _of_chat(self, record: Record) -> _PromptTokens:
        given = {name: record.value[name] for name in _TALK_FIELDS if record.value.get(name) is not None}
        # {"prompt": [...]} is read as {"messages": [...]}, because the reader expects a completion beside a prompt.
        given.setdefault("messages", given.pop("prompt", None))
        (item,) = read_chat(Record(record.source, record.path, given), ReadOptions())
        content = getattr(item, "content", None)
        if not isinstance(content, Chat):
            reason = getattr(item, "reason", "not a conversation")
            raise TreepackError(f"{record.source}: cannot be sampled ({reason}); remove the record")
        if not content.messages or content.messages[-1]["role"] == "assistant":
            raise TreepackError(
                f"{record.source}: its last message is not of a user or a tool; expected a conversation that the "
                "assistant continues"
            )
        encoder, tools = self._loaded(record.source), content.tools or self.tools
        if self._renderer is None:
            self._renderer = ChatTemplate(encoder.tokenizer, self.template)
        text = self._renderer.prompt(content, tools=tools, source=record.source)
        return _PromptTokens(encoder.encode(text), derived_group(prompt_messages(content, tools)))

    def _loaded(self, source: str) -> Encoder:
        if self.tokenizer is None:
            raise TreepackError(f"{source}: contains text, not token ids; give --tokenizer NAME")
        if self._encoder is None:
            self._encoder = Encoder(self.tokenizer)
        return self._encoder


def _token_ids(fields: tf.Fields, source: str) -> Int32:
    """Return the ids of the prompt; a record of a whole rollout has them in a field of their own.

    Raises:
        TreepackError: ids that are malformed or padded, two fields that differ, or a rollout without its prompt.
    """
    names = fields.get(tf.PROMPT) or fields[tf.IDS]
    unclear = _NOT_A_PROMPT if tf.PROMPT not in fields else {tf.ATTENTION, tf.PROMPT_MASK}
    if marks := sorted(name for kind in unclear & fields.keys() for name in fields[kind]):
        raise TreepackError(
            f"{source}: has {next(iter(names))} and {marks[0]}, so it is a rollout or padded; give the ids of the "
            "prompt alone as prompt_token_ids"
        )
    prompts = [(name, as_token_ids(values, source=source, name=name)) for name, values in names.items()]
    for name, ids in prompts[1:]:
        if not np.array_equal(ids, prompts[0][1]):
            raise TreepackError(f"{source}: {prompts[0][0]} and {name} differ; drop the wrong one")
    return prompts[0][1]
