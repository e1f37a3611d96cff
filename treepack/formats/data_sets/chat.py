"""Conversations in the message form of OpenAI, which `calls.chat_records` reads."""

from __future__ import annotations

from treepack.calls.apis.request_answer import ANSWER_FIELDS
from treepack.formats.kit import Format, read_chat
from treepack.ingest.readers.messages.conversation_settings import TOOLS

FORMAT = Format(
    name="chat",
    rank=630,
    program="OpenAI chat JSONL, with marks of ART, rLLM and ms-swift; TRL prompt and completion; Anthropic requests",
    recognised_by="`messages`, or `prompt` and `completion`, as messages or as text",
    requires="messages:objects; prompt:talk, completion:talk",
    checked="none",
    used=[
        *"""
        system tools chat_template_kwargs prompt completion messages.loss messages.trainable messages.weight
        messages.loss_scale reward id group_id messages! prompt! completion!
        """.split(),
        # Other names of tools and answers, whose texts must be among the texts of the trajectory.
        *(f"{name}.*" for name in sorted({*TOOLS, *ANSWER_FIELDS} - {"tools", "completion"})),
    ],
    dropped="""
        images, videos, audios (records that have some are skipped);
        content parts except text, tool_use, tool_result and thinking (records that have some are skipped)
    """,
    keeps="masks, rewards, lineage",
    read=read_chat,
)
