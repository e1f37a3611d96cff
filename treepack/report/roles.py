"""The role of every token of a trie: system, user, assistant or tool, by the headers that the chat template prints.

    tokenizer --learn_headers--> MessageHeader, MessageHeader, ...      Trie, headers --mark_roles--> TokenRoles

The template renders conversations whose messages are markers. The text between two markers is the end of one message
and the header of the next. The end alone is known from a rendering that stops there.

    rendering   ...mark1z<|im_end|>\\n<|im_start|>assistant\\nmark2z...
    the end           ~~~~~~~~~~~~~~
    the header                      ~~~~~~~~~~~~~~~~~~~~~~~~

A header counts only if it begins with an added token, such as <|im_start|>, because the text of a message may contain
any other words. Without a header for users and one for assistants the roles stay unknown.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.trie.trie import Trie

ROLES = ("unknown", "system", "user", "assistant", "tool")  # a role is stored as its place in this list
_PROBE = "probe"  # name of the function that the assistant calls; a header ends before it
_WINDOW = 32  # tokens that are read after an added token to find the header that it starts
_VARIABLE = re.compile(rf"{_PROBE}|</?think>")
_FIRST_LINE = re.compile(r"[^\n]*\n*")

_Message = dict[str, Any]
_Tools = list[Any] | None
_Render = Callable[[list[_Message], _Tools], str]
_Decode = Callable[[list[list[int]]], list[str]]


@dataclass(frozen=True, slots=True)
class MessageHeader:
    """A text that starts a message of `role`; with `after`, the message starts after the text."""

    role: str
    text: str
    after: bool = False


@dataclass(frozen=True, slots=True)
class TokenRoles:
    """The role of each token as its place in `ROLES`, uint8 [N_tree], and the tokens that start a message, bool."""

    role: NDArray[np.uint8]
    starts: NDArray[np.bool_]


def learn_headers(tokenizer: Any, template: str | None = None) -> list[MessageHeader]:
    """Return the headers of `template`, or else of the tokenizer's, the longest first; none if they are not known."""
    if not (template or tokenizer.chat_template):
        return []
    render = partial(_render, tokenizer, template)
    # Longest first: <|im_start|> must not be taken for a shorter token that it begins with.
    added = sorted(tokenizer.get_added_vocab(), key=lambda token: (-len(token), token))
    variants: dict[tuple[str, str, bool], list[str]] = defaultdict(list)
    for messages, tools in _conversations():
        for header in _headers_of(render, messages, tools, added):
            variants[header.role, _first_added(header.text, added), header.after].append(header.text)
    headers: dict[str, MessageHeader] = {}
    # Roles in this order, because some templates print tool results as messages of the user.
    for (role, _, after), texts in sorted(variants.items(), key=lambda item: _PREFERRED.index(item[0][0])):
        # <|im_start|>assistant\n and <|im_start|>assistant\n<think>\n\n</think>\n\n -> <|im_start|>assistant\n
        text = _common_start(texts)
        headers.setdefault(text.rstrip(), MessageHeader(role, text, after))
    roles = {header.role for header in headers.values()}
    if not {"user", "assistant"} <= roles:
        return []
    return sorted(headers.values(), key=lambda header: (-len(header.text), header.text))


def _common_start(texts: Sequence[str]) -> str:
    shortest = min(texts, key=len)
    size = next((i for i in range(len(shortest)) if len({text[i] for text in texts}) > 1), len(shortest))
    return shortest[:size]


_PREFERRED = ("user", "assistant", "tool", "system")


def _conversations() -> Iterator[tuple[list[_Message], _Tools]]:
    """Yield conversations of markers, and the tools of each. A template may refuse some of them."""
    text_only = ("system", "user", "assistant", "user", "assistant", "user")
    for roles in (text_only, text_only[1:]):
        yield [{"role": role, "content": _mark(k)} for k, role in enumerate(roles)], None
    function = {
        "name": _PROBE,
        "description": _PROBE,
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": _PROBE}}},
    }
    # Templates differ in the form of arguments, and some refuse a text beside a call.
    for as_text, content in product((False, True), ("", _mark(2))):
        arguments: Any = {"key": "call2z"}
        call = {"name": _PROBE, "arguments": '{"key": "call2z"}' if as_text else arguments}
        yield (
            [
                {"role": "system", "content": _mark(0)},
                {"role": "user", "content": _mark(1)},
                {
                    "role": "assistant",
                    "content": content,
                    "tool_calls": [{"id": "probe0000", "type": "function", "function": call}],
                },
                {"role": "tool", "tool_call_id": "probe0000", "name": _PROBE, "content": _mark(3)},
                {"role": "assistant", "content": _mark(4)},
                {"role": "user", "content": _mark(5)},
            ],
            [{"type": "function", "function": function}],
        )


def _mark(k: int) -> str:
    return f"mark{k}z"


def _headers_of(
    render: _Render, messages: list[_Message], tools: _Tools, added: Sequence[str]
) -> Iterator[MessageHeader]:
    """Yield the headers of one rendering; none if the template refuses the messages."""
    whole = render(messages, tools)
    places = [_place(whole, k) for k in range(len(messages))]
    if messages[0]["role"] == "system" and places[0] is not None and _first_added(whole, added):
        yield MessageHeader("system", _first_line(whole[: places[0][0]], added))
    for k, message in enumerate(messages):
        role, here, before = message["role"], places[k], places[k - 1]
        if k == 0 or here is None or before is None:
            continue
        end = _end_of(render, messages[:k], tools)
        if end is None:  # the template refuses to stop there
            continue
        joint = whole[before[1] : here[0]]
        header = _cut(_without_end(joint, end, added))
        if _first_added(header, added):
            yield MessageHeader(role, header)
        elif not header and messages[k - 1]["role"] == "tool":
            # DeepSeek prints the answer to tool results directly after their last token, without a header.
            last = max((token for token in added if token in joint), key=joint.rfind, default=None)
            if last:
                yield MessageHeader(role, last, after=True)


def _render(tokenizer: Any, template: str | None, messages: list[_Message], tools: _Tools) -> str:
    from treepack.tokenise.template.sandbox import compiled, plain_message

    try:
        text = template or tokenizer.get_chat_template(tools=tools)
        # Without content that is None, as transformers renders by default.
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        variables = tokenizer.special_tokens_map
        return compiled(text).render([plain_message(each) for each in given], tools=tools, variables=variables)[0]
    except Exception:  # a template is foreign code, which can raise anything; then other conversations decide
        return ""


def _place(text: str, k: int) -> tuple[int, int] | None:
    """Return the first character of the markers of message k and one past the last; None if none was printed."""
    matches = list(re.finditer(f"(?:mark|call){k}z", text))
    return (matches[0].start(), matches[-1].end()) if matches else None


def _end_of(render: _Render, messages: list[_Message], tools: _Tools) -> str | None:
    """Return the text that the template prints after the last of `messages`; None if it refuses to end there."""
    text = render(messages, tools)
    place = _place(text, len(messages) - 1)
    return text[place[1] :] if place else None


def _without_end(joint: str, end: str, added: Sequence[str]) -> str:
    """Return `joint` without the end of the message before it."""
    if joint.startswith(end.rstrip()):
        return joint[len(end.rstrip()) :].lstrip()
    # gpt-oss ends its last answer with <|return|> and earlier ones with <|end|>: remove one token.
    rest = joint.lstrip()
    return rest[len(_first_added(rest, added)) :].lstrip()


def _first_added(text: str, added: Sequence[str]) -> str:
    """Return the added token that `text` begins with, or an empty text."""
    return next((token for token in added if text.startswith(token)), "")


def _cut(header: str) -> str:
    """Return a header up to a function's name or a block of reasoning, which messages may have or not."""
    return _VARIABLE.split(header)[0]


def _first_line(text: str, added: Sequence[str]) -> str:
    """Return the header of a system message, which a text of the template may follow."""
    # "<|im_start|>system\n# Tools ..." -> the first line; "<|start|>system<|message|>You ..." -> up to its last token
    line = _FIRST_LINE.match(text)
    first = line[0] if line else text
    end = max((first.rfind(token) + len(token) for token in added if token in first), default=0)
    return first if first[end:].strip() == "system" else first[:end]


def mark_roles(trie: Trie, headers: Sequence[MessageHeader], vocabulary: dict[str, int], decode: _Decode) -> TokenRoles:
    """Return the role of each token. A message starts with the first token of its header, which counts to its role.

    If two paths separate inside a header, the message starts after that point. Tokens before the first header are the
    system's; in a tree without any header, roles are unknown.

    Args:
        trie: the trie.
        headers: headers of its chat template; without them, roles are unknown.
        vocabulary: id of each added token.
        decode: converts lists of token ids to texts.
    """
    role, starts = np.zeros(trie.tokens_tree, np.uint8), np.zeros(trie.tokens_tree, np.bool_)
    if not headers:
        return TokenRoles(role, starts)
    changes = _changes(trie, headers, vocabulary, decode)
    places = np.array(sorted(changes), np.int64)
    kinds = np.array([ROLES.index(changes[place]) for place in places.tolist()], np.uint8)
    # The role at the end of each node: the role of its last change, else of its parent. Parents come before children.
    last = np.searchsorted(places, trie.node_start[1:], side="left") - 1
    own = (last >= 0) & (places[last] >= trie.node_start[:-1]) if len(places) else np.zeros(trie.num_nodes, np.bool_)
    at_end = np.where(own, kinds[last] if len(places) else 0, 0).tolist()
    # Text before the first header is the system's, but a tree without any header is not a conversation.
    talks = np.bincount(
        trie.tree_id[np.searchsorted(trie.node_start, places, side="right") - 1], minlength=trie.num_trees
    )
    at_start = np.where(talks[trie.tree_id] > 0, ROLES.index("system"), 0).tolist()
    for node, up in enumerate(trie.parent.tolist()):
        if up >= 0:
            at_start[node] = at_end[up]
        if not own[node]:
            at_end[node] = at_start[node]
    # Fill runs: each begins at a node or at a change. Nodes at 0 and 5, change at 3 -> runs 0-2, 3-4, 5-...
    begins = np.concatenate([trie.node_start[:-1], places])
    values = np.concatenate([np.array(at_start, np.uint8), kinds])
    order = np.argsort(begins, kind="stable")  # a change at the start of a node comes after the node, so it counts
    role[:] = np.repeat(values[order], np.diff(begins[order], append=trie.tokens_tree))
    starts[places] = True
    starts[trie.node_start[:-1][trie.parent < 0]] = True
    return TokenRoles(role, starts)


def _changes(
    trie: Trie, headers: Sequence[MessageHeader], vocabulary: dict[str, int], decode: _Decode
) -> dict[int, str]:
    """Return the new role at each token that starts a message."""
    added = sorted(vocabulary, key=lambda token: -len(token))
    by_id: dict[int, list[MessageHeader]] = defaultdict(list)
    for header in sorted(headers, key=lambda one: -len(one.text)):
        by_id[vocabulary[_first_added(header.text, added)]].append(header)
    children = _children(trie)
    anchors = np.flatnonzero(np.isin(trie.tokens, list(by_id)))
    nodes = np.searchsorted(trie.node_start, anchors, side="right") - 1
    changes: dict[int, str] = {}
    # (tokens read so far, node that the last of them is in, token at which the message would start)
    waiting = [
        (tuple(trie.tokens[at : min(at + _WINDOW, trie.node_start[node + 1])].tolist()), node, at)
        for at, node in zip(anchors.tolist(), nodes.tolist(), strict=True)
    ]
    texts: dict[tuple[int, ...], str] = {}
    while waiting:
        unread = list({ids for ids, _, _ in waiting} - texts.keys())
        texts |= zip(unread, decode([list(ids) for ids in unread]), strict=True)
        ahead: list[tuple[tuple[int, ...], int, int]] = []
        for ids, node, at in waiting:
            match, is_open = _match(texts[ids], by_id[ids[0]])
            below = children.get(node, ())
            if is_open and len(ids) < _WINDOW and below:
                ahead += [_longer(trie, ids, child) for child in below]
            elif match is not None:
                changes |= dict.fromkeys(_first_tokens(trie, match, node, at, below), match.role)
        waiting = ahead
    return changes


def _match(text: str, headers: Sequence[MessageHeader]) -> tuple[MessageHeader | None, bool]:
    """Return the longest header that `text` begins with, and whether more text could make a longer one match."""
    # "<|im_start|>user" matches the header of users, but "\n<tool_response>" may follow, which is that of tools.
    for header in headers:
        wanted = header.text.rstrip()
        if text.startswith(wanted):
            return header, False
        if wanted.startswith(text):
            shorter = (other for other in headers if text.startswith(other.text.rstrip()))
            return next(shorter, None), True
    return None, False


def _first_tokens(trie: Trie, header: MessageHeader, node: int, at: int, below: Sequence[int]) -> list[int]:
    """Return the tokens with which a message of `header` starts; with `after`, perhaps one in each child."""
    if not header.after:
        return [at]
    return [at + 1] if at + 1 < trie.node_start[node + 1] else [int(trie.node_start[child]) for child in below]


def _longer(trie: Trie, ids: tuple[int, ...], child: int) -> tuple[tuple[int, ...], int, int]:
    """Return `ids` and the tokens of a child of their node after them; a message would start with the child."""
    start, end = int(trie.node_start[child]), int(trie.node_start[child + 1])
    return ids + tuple(trie.tokens[start : min(end, start + _WINDOW - len(ids))].tolist()), child, start


def _children(trie: Trie) -> dict[int, list[int]]:
    children: dict[int, list[int]] = defaultdict(list)
    for node, up in enumerate(trie.parent.tolist()):
        if up >= 0:
            children[up].append(node)
    return children
