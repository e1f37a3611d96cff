"""The end of the trained text of a turn: stop tokens of every template, and none after a cut answer."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from support import real_templates, template_stops
from support.template_oracle import decode
from support.template_stops import CALL, CALLING, PLAIN, assistant, read, user
from treepack.tokenise.template.stops import CUT_NOTE
from treepack.tokenise.tokenization import load_tokenizer
from treepack.trajectory import Skipped, Tokens, Trajectory

# Their marks leave the end of a turn with calls untrained, and the marks decide.
WITHOUT_STOP = {"deepseek_r1_distill_training", "diffusion_gemma_training"}
USUAL = "qwen2_5 qwen3 qwen3_training glm4moe glm4moe_training gptoss gemma3 deepseekv3 llama3_1 phi3_5".split()
NAMES = [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in real_templates.names()]


@pytest.fixture
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return load_tokenizer(real_templates.save(request.param, tmp_path / request.param))


def texts(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> list[list[str]]:
    """The text of each sample in sections: prompt, trained, prompt, trained, .. and the rest if it is not empty."""
    done = []
    for sample in read(tokenizer, messages, **options):
        assert isinstance(sample, Trajectory)
        decoded = decode(tokenizer, sample)
        ends = [0, *(place for span in decoded.spans for place in span), len(decoded.text)]
        sections = [decoded.text[a:b] for a, b in pairwise(ends)]
        done.append(sections if sections[-1] else sections[:-1])
    return done


def notes(samples: list[Trajectory | Skipped]) -> list[str]:
    return [note for sample in samples if isinstance(sample, Trajectory) for note in sample.notes]


@pytest.mark.parametrize("tokenizer", NAMES, indirect=True)
def test_each_trained_turn_ends_in_a_special_token_or_a_note_names_the_template(
    tokenizer: Any, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["tokenizer"]
    said = f"the chat template {name} ends a turn without a special token of the tokenizer, so no stop token is trained"
    for messages in (PLAIN, CALLING):
        found = template_stops.ends(tokenizer, messages)
        assert (messages is CALLING and found is None) or (
            found and all(found) == (said not in _notes(tokenizer, messages))
        )
    assert template_stops.ends(tokenizer, PLAIN) is not None
    assert (said in _notes(tokenizer, CALLING)) == (name in WITHOUT_STOP)


def _notes(tokenizer: Any, messages: list[dict[str, Any]]) -> list[str]:
    return notes(read(tokenizer, messages))


@pytest.mark.parametrize("tokenizer", NAMES, indirect=True)
def test_a_cut_answer_trains_its_text_and_not_its_end(tokenizer: Any) -> None:
    whole, cut = texts(tokenizer, PLAIN), texts(tokenizer, PLAIN, cut=True)
    trained = [section for sample in cut for section in sample[1::2]]
    assert [section[-5:] for section in trained] == ["SAID1", "SAID2"]
    # The last turn ends with its text; the prompt of a later turn still has the end of an earlier one, untrained.
    assert cut[-1][-1].endswith("SAID2")
    assert "".join(whole[-1]).startswith("".join(cut[-1]))
    assert notes(read(tokenizer, PLAIN, cut=True)).count(CUT_NOTE) == 1


@pytest.mark.parametrize("tokenizer", ["qwen2_5"], indirect=True)
def test_one_sample_per_turn_respects_cuts_and_keeps_the_end_in_later_prompts(tokenizer: Any) -> None:
    first, second = texts(tokenizer, PLAIN, cut=True, expand="turns")
    assert (first[1], second[1]) == ("SAID1", "SAID2")
    assert "SAID1<|im_end|>\n<|im_start|>user\nNuts?<|im_end|>" in second[0]


@pytest.mark.parametrize("tokenizer", ["qwen2_5"], indirect=True)
def test_a_cut_in_the_arguments_of_a_call_trains_no_character_after_them(tokenizer: Any) -> None:
    broken = CALL | {"function": {"name": "stock", "arguments": '{"part": "bo'}}
    ((_, trained),) = texts(tokenizer, [user("Bolts?"), assistant("", tool_calls=[broken])], cut=True)
    assert trained.endswith('{\\"part\\": \\"bo')  # as JSON text, the form of this template


@pytest.mark.parametrize("tokenizer", ["qwen2_5"], indirect=True)
def test_a_cut_after_a_whole_call_trains_the_call(tokenizer: Any) -> None:
    ((_, trained),) = texts(tokenizer, CALLING[:2], cut=True)
    assert trained.endswith("</tool_call>")


@pytest.mark.parametrize("tokenizer", ["qwen3"], indirect=True)
def test_a_cut_in_a_thought_does_not_train_its_closing_tag(tokenizer: Any) -> None:
    ((_, trained),) = texts(tokenizer, [user("Bolts?"), assistant("", reasoning_content="Let me se")], cut=True)
    assert trained == "<think>\nLet me se"


def test_glm_trains_the_markers_that_its_training_template_trains(tmp_path: Path) -> None:
    plain, marked = (load_tokenizer(real_templates.save(n, tmp_path / n)) for n in ("glm4moe", "glm4moe_training"))
    for messages in (PLAIN, CALLING, [*CALLING, user("Nuts?"), assistant("SAID3"), user("Thanks.")]):
        ours, theirs = texts(plain, messages), texts(marked, messages)
        assert ours == theirs
        assert [section.rpartition("<|")[2] for section in ours[0][1::2]][-1] == "user|>"
    ((_, first, _, _),) = texts(plain, CALLING)
    assert first.endswith("</tool_call><|observation|>")


def test_an_answer_before_another_answer_has_no_marker_to_train(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(real_templates.save("glm4moe", tmp_path))
    messages = [user("Bolts?"), assistant("SAID1"), assistant("SAID2")]
    trained = [section for sample in texts(tokenizer, messages) for section in sample[1::2]]
    assert [section.partition("SAID")[2] for section in trained] == ["1", "2<|user|>"]
    assert sum("so no stop token is trained" in note for note in _notes(tokenizer, messages)) == 1


def test_markers_and_cuts_are_the_same_ids_as_the_text_alone(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(real_templates.save("glm4moe", tmp_path))
    (sample,) = read(tokenizer, PLAIN)
    assert isinstance(sample, Trajectory)
    assert isinstance(sample.content, Tokens)
    whole = tokenizer.encode("".join(texts(tokenizer, PLAIN)[0]), add_special_tokens=False)
    assert sample.content.tokens.tolist() == whole
