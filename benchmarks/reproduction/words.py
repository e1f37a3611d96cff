"""The made-up vocabulary of both tasks: 131 words, one token each, so that no tokenizer is needed.

    encode("<steps> 17 a: + 5 ?")  ->  [2, 22, 102, 114, 10, 4]

Numbers from 0 to 96 are one word each. Token 0 only fills batches up.
"""

from __future__ import annotations

import numpy as np

from treepack.trajectory import Int32

NUM_NUMBERS = 97
LABELS = tuple(f"{letter}:" for letter in "abcdefghijkl")
ACTIONS = ("north", "east", "south", "west", "take", "open")
WORDS = (
    *("<pad>", "<stop>", "<steps>", "<maze>", "?"),
    *map(str, range(NUM_NUMBERS)),
    *LABELS,
    *("+", "-", "*", "=", "answer"),
    *ACTIONS,
    *("wall", "floor", "pit", "key", "door", "empty"),
)
ID = {word: number for number, word in enumerate(WORDS)}
PAD, STOP = ID["<pad>"], ID["<stop>"]


def encode(text: str) -> Int32:
    """Return the token ids of words that spaces separate, int32 [n].

    Raises:
        KeyError: a word that is not in the vocabulary.
    """
    return np.array([ID[word] for word in text.split()], np.int32)
