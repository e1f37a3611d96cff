"""The text of a message of ChatGPT, by the type of its content.

{"content_type": "text", "parts": ["Hello"]}  ->  Hello
{"content_type": "code", "text": "print(1)"}  ->  print(1)
{"content_type": "multimodal_text", "parts": [{"content_type": "image_asset_pointer"}]}  ->  a reason: it is not text
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treepack.formats.kit import MEDIA_REASON, JsonObject, TreepackError, as_text, shown

Node = JsonObject

# Fields of `content` that are read or describe it, over all its types.
CONTENT = frozenset(
    """
    content_type parts text language response_format_name thoughts source_analysis_msg_id content result summary assets
    tether_id url domain title name user_profile user_instructions model_set_context
    """.split()
)
# Fields that are text or null, of a message and of a content; another value would be left out in silence.
_TEXT_OF_MESSAGE = ("status", "recipient", "channel")
_TEXT_OF_CONTENT = tuple("text result title url user_profile user_instructions model_set_context".split())
# Parts that repeat an audio_transcription as sound.
_SOUND = frozenset({"audio_asset_pointer", "real_time_user_audio_video_asset_pointer"})
_MEDIA = _SOUND | {"image_asset_pointer", "video_container_asset_pointer"}


def reason_of(node: Node, source: str) -> str | None:
    """Return the reason why text cannot represent the message of a node, or None if it can.

    Raises:
        TreepackError: the content has another form.
    """
    content = content_of(node, source)
    kinds = [str(part.get("content_type")) for part in _list(content) if isinstance(part, dict)]
    has_words = "audio_transcription" in kinds
    for kind in kinds:
        if kind in _MEDIA and not (has_words and kind in _SOUND):
            return MEDIA_REASON
        if kind not in _MEDIA and kind != "audio_transcription":
            return f"content parts of type '{kind[:40]}' are not read"
    kind = str(content.get("content_type"))
    if content and kind not in _TEXTS and kind not in ("thoughts", "reasoning_recap"):
        return f"content of type '{kind[:40]}' is not read"
    return None


def content_of(node: Node, source: str) -> JsonObject:
    """Return the content of the message of a node; an empty one for a node without a message.

    Raises:
        TreepackError: the content, or a text of the message, has another form.
    """
    message = node["message"]
    if message is None:
        return {}
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, dict):
        raise TreepackError(f"{source}: a message has the content {shown(content)}; expected content_type and parts")
    for holder, names in ((message, _TEXT_OF_MESSAGE), (content, _TEXT_OF_CONTENT)):
        for name in names:
            as_text(holder.get(name), source=source, name=f"{name} of a message", default="")
    if not isinstance(content.get("parts"), list | None) or not all(map(_is_part, _list(content))):
        raise TreepackError(f"{source}: a message has the parts {shown(content['parts'])}; expected texts or objects")
    return content


def _is_part(part: Any) -> bool:
    return (
        part is None or isinstance(part, str) or (isinstance(part, dict) and isinstance(part.get("text"), str | None))
    )


def _list(content: JsonObject) -> list[Any]:
    return content.get("parts") or []


def _parts(content: JsonObject) -> str:
    """Return the text of `parts`; a transcription is text too."""
    texts = [part.get("text") if isinstance(part, dict) else part for part in _list(content)]
    return "\n".join(text for text in texts if isinstance(text, str) and text)


def _quote(content: JsonObject) -> str:
    heads = [content.get("title"), content.get("url"), content.get("text")]
    return "\n".join(text for text in heads if isinstance(text, str) and text)


def _instructions(content: JsonObject) -> str:
    texts = [content.get("user_profile"), content.get("user_instructions")]
    return "\n\n".join(text for text in texts if isinstance(text, str) and text)


# The text of each type of content.
_TEXTS: dict[str, Callable[[JsonObject], str]] = {
    "text": _parts,
    "multimodal_text": _parts,
    "code": lambda content: str(content.get("text") or ""),
    "execution_output": lambda content: str(content.get("text") or ""),
    "system_error": lambda content: str(content.get("text") or ""),
    "tether_browsing_display": lambda content: str(content.get("result") or ""),
    "tether_quote": _quote,
    "sonic_webpage": _quote,
    "user_editable_context": _instructions,
    "model_editable_context": lambda content: str(content.get("model_set_context") or ""),
}
CONTEXTS = frozenset({"user_editable_context", "model_editable_context"})


def chatgpt_text(node: Node, source: str) -> str:
    """Return the text of the message of a node; "" for thoughts and other contents without a text.

    Raises:
        TreepackError: the content has another form.
    """
    content = content_of(node, source)
    kind = str(content.get("content_type"))
    return _TEXTS[kind](content) if kind in _TEXTS else ""
