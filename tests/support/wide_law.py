"""A simulated law over the vocabulary of the tokenizer in sample_data, for trainers that tokenize prompts."""

from __future__ import annotations

import numpy as np

from support.markov_law import MarkovLaw

VOCAB_SIZE = 1464
STOP = 2  # eos of the tokenizer


def wide_law() -> MarkovLaw:
    """Return a law that samples the first 30 tokens only; every fifteenth, more or less, ends the response."""
    transition = np.random.default_rng(0).random((VOCAB_SIZE, 30)) + 0.1
    transition[:, STOP] = transition.sum(1) / 14
    wide = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
    wide[:, :30] = transition / transition.sum(1, keepdims=True)
    return MarkovLaw(wide, stop=STOP)
