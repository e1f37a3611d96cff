"""Choose the class of transformers that would read a tokenizer, and build the backend that the class would build.

    tokenizer_config.json, config.json  --class_of-->  "Qwen2Tokenizer"  --built-->  a backend of `tokenizers`

A class either takes tokenizer.json as it is, or takes only its vocabulary and merges, and replaces the other steps by
its own, whatever the file contains. This module contains only models and classes of which the tests show that the
result equals transformers'. For all others `class_of` returns None, and transformers has to read the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

AS_IT_IS = "TokenizersBackend"  # the class that takes tokenizer.json as it is
_NAMES_OF_AS_IT_IS = frozenset({AS_IT_IS, "PreTrainedTokenizer", "PreTrainedTokenizerFast"})
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The class that transformers has for a model type, which counts if tokenizer_config.json names another one. "" is a
# folder without config.json.
CLASS_OF_MODEL: dict[str, str | None] = {
    "": None,
    **dict.fromkeys(
        "afmoe apertus arcee deepseek_v2 deepseek_v3 deepseek_v32 exaone4 gemma4 gemma4_text gpt_oss granite_swa "
        "hunyuan_v1_dense hunyuan_v1_moe lfm2 lfm2_moe llama llama4 llama4_text longcat_flash minimax nemotron_h "
        "seed_oss smollm3".split()
    ),
    **dict.fromkeys(
        "ernie4_5 ernie4_5_moe glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe granite granitemoe granitemoehybrid "
        "granitemoeshared mimo_v2_flash minimax_m2 nemotron olmo2 olmo3 phi3 phimoe smolvlm".split(),
        AS_IT_IS,
    ),
    **dict.fromkeys(
        "qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe".split(),
        "Qwen2Tokenizer",
    ),
    **dict.fromkeys("qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text".split(), "Qwen3_5Tokenizer"),
    **dict.fromkeys("gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text".split(), "GemmaTokenizer"),
    "gpt2": "GPT2Tokenizer",
}
# Model types whose tokenizer_config.json often names a wrong class: the class of the model counts.
WRONGLY_NAMED = frozenset(
    "ernie4_5 ernie4_5_moe minimax_m2 nemotron phi3 phimoe qwen2 qwen3_5 qwen3_5_moe qwen3_5_moe_text smolvlm".split()
)
_QWEN_TOKENS = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>") | {"bos_token": None}
# Special tokens that a class has if tokenizer_config.json does not set them.
DEFAULT_TOKENS: dict[str, dict[str, str | None]] = {
    AS_IT_IS: {},
    "Qwen2Tokenizer": _QWEN_TOKENS,
    "Qwen3_5Tokenizer": _QWEN_TOKENS,
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>") | {"pad_token": None},
    "GemmaTokenizer": {
        "unk_token": "<unk>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
}


def class_of(
    config: Mapping[str, Any], model_config: Mapping[str, Any] | None, has_byte_level: Callable[[], bool]
) -> str | None:
    """Return the class that reads a tokenizer, a key of `DEFAULT_TOKENS`, or None if only transformers has it.

    Args:
        config: tokenizer_config.json.
        model_config: config.json, or None.
        has_byte_level: returns True if tokenizer.json contains the name of a step on bytes.
    """
    model = "" if model_config is None else model_config.get("model_type")
    named = config.get("tokenizer_class")
    if not isinstance(named, str) or not isinstance(model, str) or model not in CLASS_OF_MODEL:
        return None
    # Code of the tokenizer's own, and a name of the model by which transformers chooses too.
    if "auto_map" in config or "model_name" in (model_config or {}):
        return None
    named, of_model = named.removesuffix("Fast"), CLASS_OF_MODEL[model]
    # Llama 3 and DeepSeek: their tokenizers work on bytes, and the class that they name would not.
    if named == "LlamaTokenizer" and model not in WRONGLY_NAMED and has_byte_level():
        return AS_IT_IS
    if of_model not in (None, named):
        named = AS_IT_IS if of_model == AS_IT_IS or named in _NAMES_OF_AS_IT_IS else named
        named = of_model if of_model is not None and model in WRONGLY_NAMED else named
    named = AS_IT_IS if named in _NAMES_OF_AS_IT_IS else named
    return named if named in DEFAULT_TOKENS else None


def built(name: str, file: Tokenizer, options: Mapping[str, Any]) -> Tokenizer | None:
    """Return the backend that class `name` builds, without the added tokens of `file` unless it takes it as it is.

    Args:
        name: a class of `class_of`.
        file: the backend of tokenizer.json; its model is changed and used.
        options: tokenizer_config.json with the special tokens of the class.

    Returns:
        None if tokenizer.json has a model that the class would not take over exactly.
    """
    if name == AS_IT_IS:
        return file
    model = file.model
    if not isinstance(model, BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    is_sentencepiece = name in ("GemmaTokenizer", "LlamaTokenizer")
    model.dropout = None
    model.ignore_merges = False
    model.fuse_unk = model.byte_fallback = is_sentencepiece
    model.unk_token = str(options["unk_token"]) if name == "GemmaTokenizer" else None
    backend = Tokenizer(model)
    if file.post_processor is not None:
        backend.post_processor = file.post_processor
    if is_sentencepiece:
        _add_steps_on_characters(backend, name, options)
    else:
        _add_steps_on_bytes(backend, name, options)
    return backend


def _add_steps_on_bytes(backend: Tokenizer, name: str, options: Mapping[str, Any]) -> None:
    prefix_space = bool(options.get("add_prefix_space"))
    if name == "GPT2Tokenizer":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    else:
        words = pre_tokenizers.Split(Regex(_QWEN2 if name == "Qwen2Tokenizer" else _QWEN3_5), behavior="isolated")
        by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=False)
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.Sequence([words, by_bytes])
    backend.decoder = decoders.ByteLevel()


def _add_steps_on_characters(backend: Tokenizer, name: str, options: Mapping[str, Any]) -> None:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if name == "GemmaTokenizer":
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    else:
        prefix_space = options.get("add_prefix_space")
        scheme = "always" if options.get("legacy") else "first"
        if prefix_space is not None and not prefix_space:
            scheme = "never"
        else:
            steps.append(decoders.Strip(content=" ", left=1))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence(steps)
