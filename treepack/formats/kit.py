"""The words of the engine that a format needs: formats of this folder and of other packages import them from here.

    Format, Record, ReadOptions         the format as a value, and the arguments of its reader
    Outcomes of Trajectory, Skipped     what a reader yields; `describe` and `conversation` make a trajectory
    read_tokens, read_chat              a record of token ids or of messages to its trajectory
    read_calls, read_chats, CallLog     calls of a model, as ids or as messages, to the trajectories of their rollout
    JsonObject, as_text, object_at, ..  checked values of fields (`readers.fields.values`)

A name that only one or two formats need is imported from the module that defines it.
"""

from __future__ import annotations

from treepack.calls.call_logs import CallLog
from treepack.calls.chat_calls import ChatCall, read_chats
from treepack.calls.chat_records import read_chat
from treepack.calls.conversations import conversation, with_notes, without
from treepack.calls.leaf_paths import leaf_paths
from treepack.calls.token_calls import TokenCall, read_calls
from treepack.errors import TreepackError
from treepack.files.input_files.companion_files import companion_path, folder_and_document, read_document
from treepack.files.input_files.inputs import STDIN
from treepack.files.input_files.records import Record
from treepack.ingest.readers.fields import endings
from treepack.ingest.readers.fields.read_options import ReadOptions
from treepack.ingest.readers.fields.rollout_facts import describe, temperature_of
from treepack.ingest.readers.fields.token_fields import mask_values
from treepack.ingest.readers.fields.unread import is_empty
from treepack.ingest.readers.fields.values import (
    JsonObject,
    as_id,
    as_objects,
    as_text,
    is_messages,
    object_at,
    object_or_empty,
    objects_at,
    quoted,
    shown,
)
from treepack.ingest.readers.format import Format
from treepack.ingest.readers.kinds import has_fields
from treepack.ingest.readers.messages.content_blocks import MEDIA_REASON, skip_reason
from treepack.ingest.readers.messages.prefills import mark_prefills
from treepack.ingest.readers.messages.response_items import messages_of_items
from treepack.ingest.readers.messages.turn_weights import as_flag
from treepack.ingest.readers.tokens.token_records import read_tokens
from treepack.trajectory import Outcome, Outcomes, Skipped, Trajectory

__all__ = [
    "MEDIA_REASON",
    "STDIN",
    "CallLog",
    "ChatCall",
    "Format",
    "JsonObject",
    "Outcome",
    "Outcomes",
    "ReadOptions",
    "Record",
    "Skipped",
    "TokenCall",
    "Trajectory",
    "TreepackError",
    "as_flag",
    "as_id",
    "as_objects",
    "as_text",
    "companion_path",
    "conversation",
    "describe",
    "endings",
    "folder_and_document",
    "has_fields",
    "is_empty",
    "is_messages",
    "leaf_paths",
    "mark_prefills",
    "mask_values",
    "messages_of_items",
    "object_at",
    "object_or_empty",
    "objects_at",
    "quoted",
    "read_calls",
    "read_chat",
    "read_chats",
    "read_document",
    "read_tokens",
    "shown",
    "skip_reason",
    "temperature_of",
    "with_notes",
    "without",
]
