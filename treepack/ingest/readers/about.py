"""What a format is and what of it survives: the text behind `treepack formats` and docs/formats.md.

Every reader module has one `ABOUT`. A test reads the format's sample under tests/rollouts and holds `keeps` against
what comes out, and `used` against the fields that the sample has.
"""

from __future__ import annotations

from dataclasses import dataclass

TOKEN_IDS, MASKS, LOGPROBS, REWARDS, LINEAGE = "token ids", "masks", "log-probabilities", "rewards", "lineage"
KEEPS = (TOKEN_IDS, MASKS, LOGPROBS, REWARDS, LINEAGE)


@dataclass(frozen=True, slots=True)
class About:
    """One format, in words.

    `program` writes it. `recognised_by` says what tells its records from those of others. `used` are the fields that
    are read, with dots for fields inside fields (`info.reward`); `dropped` those that the format is known to have and
    that are not, with the reason in brackets where it is not plain. `keeps` is a subset of `KEEPS`:

        token ids           the sampler's own, nothing is tokenised again
        masks               which tokens or messages are trained is written there, not derived from roles
        log-probabilities   of the sampled tokens
        rewards             of the rollout
        lineage             which rollouts belong to one task, or which prefix they share
    """

    program: str
    recognised_by: str
    used: tuple[str, ...]
    dropped: tuple[str, ...] = ()
    keeps: frozenset[str] = frozenset()
