"""The parts of a page that are read from the texts of a trie: segments with roles, texts, and lost sharing.

    Trie, tokenizer --read_contents--> PageContents

Without a tokenizer, roles are unknown and token ids are shown. If the page may not contain text, the roles and the
causes of lost sharing are still read from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from treepack.report.causes import LostSharing, read_sharing
from treepack.report.parts import groups_of
from treepack.report.roles import MessageHeader, learn_headers, mark_roles
from treepack.report.segments import RoleSegments, segments_of
from treepack.report.texts import NodeTexts, decoder_of, ids_as_text, node_texts
from treepack.trie.trie import Trie


@dataclass(frozen=True, slots=True)
class PageContents:
    """The part of a page that is read from texts.

    Attributes:
        segments: runs of tokens of one role, all trained or all not.
        sharing: the reasons why tokens are stored, and the causes of lost sharing.
        headers: headers of messages, the longest first; empty if roles are unknown.
        texts: texts of the nodes, or None.
        decoded: True if they are text, False if they are token ids.
        special: special tokens, which are paler than the text around them.
    """

    segments: RoleSegments
    sharing: LostSharing
    headers: list[MessageHeader]
    texts: NodeTexts | None
    decoded: bool
    special: list[str]


def read_contents(trie: Trie, tokenizer: Any, *, limit: int | None, template: str | None = None) -> PageContents:
    """Return the contents of a page of `trie`.

    Args:
        trie: the trie.
        tokenizer: its tokenizer, or None.
        limit: maximum number of tokens shown as text; None for a page without text.
        template: chat template that replaces the one of the tokenizer.
    """
    decode = decoder_of(tokenizer) if tokenizer is not None else None
    headers = learn_headers(tokenizer, template) if tokenizer is not None else []
    vocabulary = tokenizer.get_added_vocab() if tokenizer is not None else {}
    segments = segments_of(trie, mark_roles(trie, headers, vocabulary, decode or ids_as_text))
    show = None if limit is None else decode or ids_as_text
    return PageContents(
        segments=segments,
        sharing=read_sharing(trie, groups_of(trie).of, decode, show),
        headers=headers,
        texts=None if show is None or limit is None else node_texts(trie, segments, show, limit=limit),
        decoded=decode is not None,
        special=list(vocabulary) if show is not None else [],
    )
