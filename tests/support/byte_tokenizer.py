"""A small byte-level tokenizer and chat templates for tests: nothing is downloaded.

`STRIPPING` drops the reasoning of turns before the last user message, as several models' templates do; `MARKED` is the
same with generation marks; `PLAIN` keeps everything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SENTENCES = ["The quick brown fox jumps over the lazy dog.", "tool_call arguments name", "user assistant system think"]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]

HEAD = """\
{%- if tools %}{{- '<|im_start|>tools\n' }}{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endif %}
{%- set last = namespace(user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
"""
BODY = """\
        {%- if message.reasoning_content and loop.index0 > last.user %}
            {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>' + call.function.name + ' ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '</tool_call>' }}
        {%- endfor %}
"""
TAIL = """\
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
END = "        {{- '<|im_end|>' }}\n"
STRIPPING = HEAD + BODY + END + TAIL
MARKED = HEAD + "        {% generation %}\n" + BODY + END + "        {%- endgeneration %}\n" + TAIL
PLAIN = STRIPPING.replace(" and loop.index0 > last.user", "")


def save(folder: Path, template: str | None, special: list[Any] | None = None, normalizer: Any = None) -> str:
    """A byte-level BPE tokenizer of 300 tokens, with `template`, in `folder`."""
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    if normalizer is not None:
        bpe.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL if special is None else special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(SENTENCES, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return str(folder)
