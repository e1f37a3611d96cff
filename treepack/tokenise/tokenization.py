"""Text to token ids: conversations and plain text become `Tokens`, with exact spans of the trained tokens.

    rendering   <|user|>Hi<|end|><|assistant|>  Hello<|end|>  <|user|>Bye<|end|><|assistant|>  Ciao<|end|>
    sections    ------------------------------  ~~~~~~~~~~~~  ------------------------------  ~~~~~~~~~~~
    ids                 tokenised alone             alone             tokenised alone            alone

The text is cut where training starts and stops, and each section is tokenised alone: first the prompt as its sampler
saw it, then the completion. So the spans follow from the lengths of the sections and are never searched for in the ids.

    expand="trajectory"   turns that extend each other are one sample; when the template rewrites earlier turns (for
                          example, drops old reasoning), a new sample starts that trains only the remaining turns
    expand="turns"        one sample per assistant turn, with the prompt rendered as it was at that turn
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from json.encoder import encode_basestring_ascii
from typing import Any

import numpy as np

from treepack.errors import TreepackError
from treepack.files.manifest_entries import TokenizerEntry
from treepack.files.remote.hub import is_offline, load_fault, refuse_missing, snapshot
from treepack.tokenise import append_only, control_tokens
from treepack.tokenise.append_only import Message, append_only_text, sequence_totals, turn_totals
from treepack.tokenise.chat_template import ChatTemplate, RenderedTurn
from treepack.tokenise.control_tokens import ControlTokens, skip_sentence
from treepack.tokenise.encoder import Encoder
from treepack.tokenise.growth import check_growth
from treepack.tokenise.samples import sample_of, samples_of_prompts, samples_of_turns, sections_of
from treepack.tokenise.search_turns import Item, samples_of_record, tokens_of
from treepack.tokenise.stable_ids import with_stable_ids
from treepack.tokenise.template.rendering import TemplateFile, Tools, UnfaithfulError
from treepack.tokenise.template.stops import CUT_NOTE, STOP_NOTE
from treepack.trajectory import (
    FAILED,
    Chat,
    Outcome,
    Outcomes,
    PromptCompletion,
    Skipped,
    Tokens,
    Trajectory,
    derived_group,
    prompt_messages,
    prompt_tokens,
)

_REFUSED_TRAILING_NOTE = "messages after the last trained turn left out, because the template refuses them"
TRUNCATED_NOTE = "truncated rollout not trained, its reward counts in its group"
_CLOCK_NOTE = "the chat template prints today's date"

# One of them is in every folder of a tokenizer; the first is the format of fast tokenizers.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_tokenizer(name: str, *, download: bool = True) -> Any:
    """Load the fast tokenizer of a model's name or folder with transformers; without `download`, only a local copy.

    Raises:
        TreepackError: there is no tokenizer, or only a slow one.
    """
    refuse_missing(name, kind="tokenizer", files=_TOKENIZER_FILES)  # transformers takes seconds to import
    with _quiet():
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=not download or is_offline(name))
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # whatever a damaged folder makes foreign code raise, such as a panic of Rust
            raise load_fault(name, error, kind="tokenizer") from error
    # From a folder with a model alone, transformers makes a tokenizer of special tokens, which encodes text to nothing.
    if not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys():
        raise load_fault(name, ValueError("it has no tokens"), kind="tokenizer")
    if not tokenizer.is_fast:
        raise TreepackError(
            f"{name}: has only a slow tokenizer; save it as tokenizer.json, the format of fast tokenizers"
        )
    check_growth(tokenizer, name)
    return tokenizer


def read_tokenizer(name: str, *, download: bool = True) -> Any:
    """Return a tokenizer that tokenises and names itself as that of `load_tokenizer` does, but cannot be saved.

    It is a `FileTokenizer` if that one is known to be equal, because transformers takes seconds to import.

    Raises:
        TreepackError: as `load_tokenizer`.
    """
    from treepack.tokenise.file_tokenizer import FILES, read_folder

    try:
        folder = snapshot(name, FILES, download=download)
        tokenizer = read_folder(folder, name) if folder else None
    except KeyboardInterrupt:
        raise
    except BaseException:  # of damaged files or of the hub: transformers meets it again and reports it
        tokenizer = None
    if tokenizer is None:
        return load_tokenizer(name, download=download)
    check_growth(tokenizer, name)
    return tokenizer


def fingerprint(tokenizer: Any) -> TokenizerEntry:
    """Return the identity of a tokenizer: its name, its number of tokens, and the sha256 of its vocabulary by id."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    by_id = dict(zip(vocabulary.values(), vocabulary, strict=True))
    # Several tokens may share an id; sorting only the ids is faster.
    pairs = [(i, by_id[i]) for i in sorted(by_id)]
    if len(by_id) < len(vocabulary):
        pairs = sorted((i, token) for token, i in vocabulary.items())
    # What json.dumps gives for [[token, id], ...], in two thirds of its time: [["a", 0], ["b", 1]]
    text = "[" + ", ".join([f"[{encode_basestring_ascii(token)}, {i}]" for i, token in pairs]) + "]"
    return {
        "name": tokenizer.name_or_path,
        "vocab_size": len(tokenizer),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


@dataclass(frozen=True, slots=True)
class TokenisationJob:
    """Settings of tokenisation, which have the meaning that they have in `BuildOptions`.

    `tokenizer` is a name or folder, a tokenizer of transformers, or None if all content is token ids. `chat_template`
    replaces the template of the tokenizer. `tools` are the schemas for conversations without schemas of their own.
    """

    tokenizer: Any
    expand: str = "trajectory"
    tools: Tools = None
    normalize_ids: bool = False
    strict: bool = False
    per_path: bool = False
    chat_template: TemplateFile | None = None
    control_tokens: str = "keep"
    truncated: str = "keep"
    failed: str = "drop"

    def by_name(self) -> TokenisationJob:
        """Return the same job for another process, which loads the tokenizer itself instead of receiving it."""
        is_name = self.tokenizer is None or isinstance(self.tokenizer, str)
        return self if is_name else replace(self, tokenizer=self.tokenizer.name_or_path)


class TrajectoryTokeniser:
    """Tokenise one trajectory at a time; the tokenizer and the template are loaded when a trajectory needs them."""

    def __init__(self, job: TokenisationJob) -> None:
        """Load nothing yet."""
        self._job = job
        self._encoder: Encoder | None = None
        self._template: ChatTemplate | None = None
        self._control = ControlTokens()
        self._failed: tuple[str, str | None] = ("", None)  # source and rollout of the failed trajectory before

    def record(self, items: list[Item]) -> list[tuple[Item, list[Item]]]:
        """Return each of the `items` of a record with its samples.

        Raises:
            TreepackError: as for one item.
        """
        return samples_of_record(items, self, merge=self._job.expand == "turns" and not self._job.per_path)

    def __call__(self, item: Outcome) -> Outcomes:
        """Yield the samples of `item`: itself if it was skipped, else one or more trajectories of tokens.

        Raises:
            TreepackError: text without a tokenizer, or a template that cannot render it or cannot be trained on.
        """
        if isinstance(item, Skipped):
            yield item
            return
        if item.failed and self._job.failed == "drop":
            yield self._of_failed(item)
            return
        if item.failed:
            item = replace(item, metadata={FAILED: item.failed, **item.metadata})
        item = self._without_loss(item)
        if self._job.normalize_ids:
            item = with_stable_ids(item)
        if self._job.control_tokens == "text" and control_tokens.has_mark(item.content):
            yield Skipped(item.source, control_tokens.MARK_REASON, self._group(item))
            return
        for sample in self._of_rollout(item):
            # A skipped rollout needs its group too, because the group's baseline is computed over fewer rollouts then.
            is_known = isinstance(sample, Trajectory) or sample.group_id is not None
            yield sample if is_known else replace(sample, group_id=self._group(item))

    def _of_failed(self, item: Trajectory) -> Skipped:
        # A rollout of several trajectories counts once.
        before, self._failed = self._failed, (item.source, item.rollout_id)
        if item.rollout_id is not None and before == self._failed:
            return Skipped(item.source, "further trajectory of a failed rollout", is_rollout=False)
        reason = f"failed rollout ({item.failed})"
        return Skipped(item.source, reason, self._group(item), f"{item.source}: {reason}; --failed keep trains it")

    def _group(self, item: Trajectory) -> str:
        """Return the group of `item`, or the one that is derived from its prompt."""
        if item.group_id is not None:
            return item.group_id
        if isinstance(item.content, Tokens):
            return derived_group(prompt_tokens(item.content))
        if isinstance(item.content, PromptCompletion):
            return derived_group(item.content.prompt.encode())
        return derived_group(prompt_messages(item.content, item.content.tools or self._job.tools))

    def _of_rollout(self, item: Trajectory) -> Outcomes:
        if isinstance(item.content, Tokens):
            yield replace(item, group_id=self._group(item), totals=_sequence_totals(item))
        elif isinstance(item.content, PromptCompletion):
            sample = self._of_text(item, item.content)
            yield replace(sample, totals=_sequence_totals(sample)) if isinstance(sample, Trajectory) else sample
        else:
            yield from self._of_chat(item, item.content)

    def encoder(self, source: str) -> Encoder:
        """Return the encoder for text that was read at `source`.

        Raises:
            TreepackError: the job has no tokenizer, or it cannot be loaded.
        """
        if self._encoder is None:
            tokenizer = self._job.tokenizer
            if tokenizer is None:
                raise TreepackError(f"{source}: contains text, not token ids; give --tokenizer NAME")
            loaded = read_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
            self._encoder = Encoder(loaded, has_marks=self._job.control_tokens == "text")
        return self._encoder

    def _of_text(self, item: Trajectory, content: PromptCompletion) -> Outcome:
        encoder = self.encoder(item.source)
        # The prompt [bos] + "2 + 2 = " is not trained, the completion "4" + eos is.
        prompt = encoder.encode(content.prompt)
        if not np.array_equal(prompt[: len(encoder.prefix)], encoder.prefix):  # a decoded prompt begins with it
            prompt = np.concatenate([encoder.prefix, prompt])
        completion = encoder.encode(content.completion)
        if content.is_cut or (content.has_special and not encoder.ends_special(completion)):
            item = self._without_loss(replace(item, notes=(*item.notes, CUT_NOTE), is_truncated=True))
        elif content.stop is not None and not encoder.is_ended(content.stop):
            item = replace(item, notes=(*item.notes, STOP_NOTE))
        elif not content.has_special and not encoder.is_ended(content.completion):
            completion = np.concatenate([completion, encoder.end])
        return sample_of(replace(item, group_id=self._group(item)), [(prompt, 0.0), (completion, 1.0)])

    def _without_loss(self, item: Trajectory) -> Trajectory:
        """Return `item` with the weight 0 if it is truncated and such rollouts are dropped; its reward stays."""
        if self._job.truncated != "drop" or not item.is_truncated or TRUNCATED_NOTE in item.notes:
            return item
        return replace(item, weight=0.0, notes=(*item.notes, TRUNCATED_NOTE))

    def _of_chat(self, item: Trajectory, chat: Chat) -> Outcomes:
        if not chat.messages:
            yield Skipped(item.source, "empty trajectory")
            return
        # Checked before the tokenizer is loaded, and again below: a trained turn may render to nothing.
        if not any(chat.message_weights):
            yield Skipped(item.source, "no trained token")
            return
        encoder = self.encoder(item.source)
        if self._template is None:
            self._template = ChatTemplate(encoder.tokenizer, self._job.chat_template)
            self._control = ControlTokens(control_tokens.control_tokens(encoder.tokenizer, self._template.texts))
        tools = chat.tools or self._job.tools
        item = replace(item, group_id=self._group(item))
        if spelled := self._control.find(chat):
            if self._job.control_tokens == "skip":
                yield Skipped(item.source, control_tokens.REASON, detail=skip_sentence(spelled[0], item.source))
                return
            item = replace(item, notes=item.notes + control_tokens.notes_of(spelled, self._job.control_tokens))
            chat = self._control.mark(chat) if self._job.control_tokens == "text" else chat
        if self._template.reads_clock(tools):
            item = replace(item, notes=(*item.notes, _CLOCK_NOTE))
        try:
            rendered = self._template.turns(chat, tools=tools, source=item.source)
        except UnfaithfulError as error:
            yield Skipped(item.source, error.reason, item.group_id, str(error))
            return
        turns, item = rendered.turns, replace(item, notes=item.notes + rendered.notes)
        if not turns:
            yield Skipped(item.source, "no trained token")
            return
        if self._job.expand == "turns":
            samples = list(samples_of_prompts(item, encoder, turns))
        else:
            whole = ""
            # Messages after the last trained turn are not trained, but they belong to the trajectory.
            if turns[-1].message < len(chat.messages) - 1:
                try:
                    whole = self._template.whole(chat, tools=tools, source=item.source)
                except UnfaithfulError:
                    item = replace(item, notes=(*item.notes, _REFUSED_TRAILING_NOTE))
            samples = list(samples_of_turns(item, encoder, turns, whole))
        # The first usable sample carries the sums of the conversation, as the first one carries its notes.
        usable = [sample for sample in samples if isinstance(sample, Trajectory)]
        totals = self._append_only(item, chat, turns, usable) if usable else {}
        for sample in samples:
            yield replace(sample, totals=totals) if usable and sample is usable[0] else sample

    def _append_only(
        self, item: Trajectory, chat: Chat, turns: list[RenderedTurn], samples: list[Trajectory]
    ) -> Counter[str]:
        """Return the sums of a conversation with these `samples`, and of its append-only sequence."""
        totals = turn_totals(turns)
        if self._job.expand == "trajectory" and len(samples) == 1:
            return totals + _sequence_totals(samples[0])  # the sample is the sequence
        encoder, template, tools = self.encoder(item.source), self._template, chat.tools or self._job.tools
        assert template is not None
        first = None if tools is None else tools[:1]  # schemas are printed before the new messages: one is enough

        def render(messages: list[Message], prompt: bool) -> str:
            return template.whole(replace(chat, messages=messages), tools=first, source=item.source, prompt=prompt)

        try:
            sequence = append_only_text(chat, turns, render, template.special_tokens)
        except UnfaithfulError:  # the template refuses a short conversation; counted like one without a sequence
            sequence = None
        sample = sample_of(item, sections_of(encoder, *sequence), turns) if sequence else None
        if isinstance(sample, Trajectory):
            return totals + _sequence_totals(sample)
        longest = max(samples, key=lambda each: len(tokens_of(each).tokens))
        return totals + _sequence_totals(longest) + Counter({append_only.ABSENT: 1})


def _sequence_totals(sample: Trajectory) -> Counter[str]:
    """Return the sums of a sample that is one append-only sequence."""
    content = tokens_of(sample)
    return sequence_totals(len(content.tokens), content.num_trained if sample.weight > 0 else 0)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warnings that transformers logs when it is imported without torch."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
