"""Name the sub-agents, edits of the history and failures of a rollout's trajectories.

    Trie --part_notes--> a text for each trajectory

    1 2 3 4 5 6      S/turn-1                ""
    1 2 7 8          S/turn-4                "edited after 2 of 6 tokens": a compaction, a window, a template
    9 9              S/a2, agent explorer    "sub-agent explorer"

A part is compared with the part of the same agent before it. Rejected and failed attempts are in a trie only if
`build-trie --failed keep` kept them.
"""

from __future__ import annotations

import numpy as np
from pyarrow import compute as pc

from treepack.files.metadata import parse_metadata
from treepack.rl.rollout_parts import rollout_codes, rollout_parts
from treepack.trajectory import FAILED, ON_SEVERAL_PATHS
from treepack.trie.shared_prefixes import range_minima, shared_in_order
from treepack.trie.trie import Trie


def part_notes(trie: Trie) -> list[str]:
    """Return a text for each trajectory, "" for no note; O(n log n) in their number."""
    table = trie.trajectories
    facts = {
        i: parse_metadata(table["metadata"][i].as_py(), table["source"][i].as_py())
        for i in np.flatnonzero(pc.match_substring_regex(table["metadata"], f'"(agent|{FAILED})"').to_numpy()).tolist()
    }
    agents = [str(facts[i].get("agent") or "") if i in facts else "" for i in range(trie.num_trajectories)]
    notes: list[list[str]] = [[] for _ in agents]
    if (codes := rollout_codes(table)) is not None:
        parts = rollout_parts(table)
        kinds = np.unique(agents, return_inverse=True)[1]
        main = np.empty(int(codes.max(initial=-1)) + 1, np.int64)
        by_part = np.lexsort((parts, codes))[::-1]
        main[codes[by_part]] = by_part  # the last entry that is written is the first part
        for i in np.flatnonzero(kinds != kinds[main[codes]]).tolist():
            notes[i].append(f"sub-agent {agents[i]}" if agents[i] else "the main agent")
        # Parts of a rollout and agent, in order: x/0 x/1 x/2 -> before [x/0 x/1], after [x/1 x/2]
        order = np.lexsort((parts, kinds, codes))
        order = order[parts[order] != ON_SEVERAL_PATHS]
        follows = (np.diff(codes[order]) == 0) & (np.diff(kinds[order]) == 0)
        before, after = order[:-1][follows], order[1:][follows]
        low, high = np.minimum(before, after), np.maximum(before, after)
        kept = range_minima(shared_in_order(trie), low + 1, high + 1)
        for i, tokens, length in zip(after.tolist(), kept.tolist(), trie.lengths[before].tolist(), strict=True):
            if tokens < length:
                notes[i].append(f"edited after {tokens:,} of {length:,} tokens")
    for i, fields in facts.items():
        if fields.get(FAILED):
            notes[i].append(f"failed: {fields[FAILED]}")
    return [", ".join(each) for each in notes]
