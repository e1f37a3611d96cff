"""The first lines of every summary: a sentence on many skipped rollouts, and one on conversations and trajectories.

614 conversations, 6,321 trajectories: the template rewrites earlier turns
10 search trees with 111 paths, 812 trajectories: one trajectory per turn
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treepack.ingest.conversation_counts import MANIFEST_KEY, Conversations, conversations_of_manifest
from treepack.ingest.read_log import LARGE_SHARE


def conversation_entries(conversations: Conversations | None, totals: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a report on a trie or rows with `totals`: "conversations", if known, and "summary"."""
    entry = {MANIFEST_KEY: conversations.as_record()} if conversations is not None else {}
    return entry | {"summary": conversation_summary(conversations, totals)}


def skipped_sentence(skipped: Mapping[str, Any] | None) -> str | None:
    """Return a sentence if more than `LARGE_SHARE` of the rollouts were skipped; `skipped` is that of a manifest."""
    if not skipped:
        return None
    num_skipped, reason = skipped["num_skipped"], skipped["main_reason"]
    num_rollouts = num_skipped + skipped["num_rollouts"]
    if num_skipped <= LARGE_SHARE * num_rollouts:
        return None
    return (
        f"{num_skipped:,} of {num_rollouts:,} rollouts ({100 * num_skipped / num_rollouts:.1f} %) were skipped, "
        f"{skipped['num_main_reason']:,} of them for this reason: {reason}"
    )


def summary_of_manifest(manifest: Mapping[str, Any]) -> str:
    """Return the sentence for a trie or rows with this manifest."""
    return conversation_summary(conversations_of_manifest(manifest), manifest["totals"])


def summary_of_routes(routes: Mapping[str, Any]) -> str:
    """Return the sentence for the entry `routes` of a trie's manifest: kept routes, and the cost of conflicts."""
    recorded, differing = quantity(routes["recorded"], "token"), quantity(routes["differing"], "token")
    added = routes["tokens_split"] - routes["tokens_shared"]
    text = (
        f"routes of {routes['layers']} layers with {routes['experts']} experts, recorded for {recorded}, with "
        f"conflicts in {differing} of shared prefixes"
    )
    if without := routes.get("without"):  # older tries do not count them
        verbs = {"split": "share no token with others", "first": "take those of shared prefixes"}
        text += f", and for no token of {quantity(without, 'trajectory')}, which {verbs[routes['conflicts']]}"
    if routes["conflicts"] == "split":
        return f"{text}; the trie splits there, which adds {quantity(added, 'token')}"
    return f"{text}; the first trajectory counts there, which saves {quantity(added, 'token')}"


def conversation_summary(conversations: Conversations | None, totals: Mapping[str, Any]) -> str:
    """Return the numbers of conversations and of trajectories, and the reason if they differ."""
    num_trajectories = int(totals["num_trajectories"])
    if conversations is None:
        return f"{quantity(num_trajectories, 'trajectory')} of token ids or plain text"
    became = quantity(conversations.num_samples, "trajectory")
    reasons = _reasons(conversations)
    text = f"{', '.join(_sources(conversations))}, {became}" + (f": {'; '.join(reasons)}" if reasons else "")
    is_whole = num_trajectories == conversations.num_samples
    return text if is_whole else f"{text}, of which {quantity(num_trajectories, 'trajectory')} remain"


def _sources(conversations: Conversations) -> list[str]:
    """Return the numbers of search trees, of other conversations, and of rollouts of token ids."""
    sources = []
    if conversations.num_trees:
        paths = quantity(conversations.num_paths, "path")
        sources.append(f"{quantity(conversations.num_trees, 'search tree')} with {paths}")
    if single := conversations.num_conversations - conversations.num_paths:
        sources.append(quantity(single, "conversation"))
    if others := conversations.num_rollouts - conversations.num_conversations:
        sources.append(f"{quantity(others, 'rollout')} of token ids or plain text")
    return sources


def _reasons(conversations: Conversations) -> list[str]:
    """Return the reasons for more trajectories than conversations, and the merging of turns on several paths."""
    reasons = []
    others = conversations.num_rollouts - conversations.num_conversations
    if conversations.num_samples != conversations.num_parts + others:
        reasons.append("one trajectory per turn")
    elif conversations.num_split:
        reasons.append("the template rewrites earlier turns")
    if conversations.num_merged_turns:
        turns, merged = conversations.num_turns_on_paths, conversations.num_merged_turns
        reasons.append(f"{quantity(turns, 'turn')} on several paths became {quantity(merged, 'trajectory')}")
    return reasons


def quantity(count: int, noun: str) -> str:
    """Return `1 row`, `2 rows`, `2 trajectories`."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"
