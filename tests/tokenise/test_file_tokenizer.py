"""Tokenizers read from files equal the ones of transformers, or transformers reads them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from support.byte_tokenizer import PLAIN, SENTENCES, save
from support.paths import ROOT
from treepack.errors import TreepackError
from treepack.files.remote.hub import is_offline
from treepack.report.roles import learn_headers
from treepack.tokenise.file_tokenizer import FIELDS, NAMED, FileTokenizer, read_folder
from treepack.tokenise.tokenization import fingerprint, load_tokenizer, read_tokenizer
from treepack.tokenise.tokenizer_classes import AS_IT_IS, CLASS_OF_MODEL, DEFAULT_TOKENS, WRONGLY_NAMED

# Words, blanks, combining marks, byte tokens of sentencepiece, and special tokens with text around them.
WORDS = ["The quick", " brown", "fox", " 12345", "3.14", "'s", "'LL", "_x", "(y)", "<0x0A>", "new", "\u65e5\u672c", "é"]
BLANKS = ["  ", "\t", "\n", "\n\n", "\r\n", "\u00a0", "\x00", "\u200d", "▁"]
LETTERS = ["e\u0301", "\u0915\u094d\u0937", "\ufb01", "\u0130", "\U0001f9d1"]
SPECIAL = "<|im_end|> <|endoftext|> <s> </s> <bos> <unk> <tag> <new> <image> [strip]".split()
LLAMA = {"model_type": "llama"}  # transformers needs a config.json to read a cached model of the hub
PARTS = [*WORDS, *BLANKS, *LETTERS, *SPECIAL]


@cache
def texts() -> list[str]:
    generator = random.Random(0)
    return PARTS + ["".join(generator.choices(PARTS, k=generator.randrange(2, 9))) for _ in range(40)]


@cache
def byte_model(digits: bool = False) -> str:
    """A tokenizer.json on bytes, whose steps no class of transformers has."""
    backend = Tokenizer(models.BPE(ignore_merges=digits))
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    train(backend, ["<|im_end|>", "<|endoftext|>", AddedToken("[strip]", lstrip=True, rstrip=True)])
    backend.add_tokens([AddedToken("<tag>", normalized=False), "new"])
    return str(backend.to_str())


@cache
def character_model() -> str:
    """A tokenizer.json like those converted from sentencepiece, as Llama 2 has it."""
    letters = {letter for text in [*SENTENCES, *PARTS] for letter in text.replace(" ", "▁")}
    backend = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    train(
        backend,
        ["<unk>", "<s>", "</s>", "<bos>", "<eos>", *byte_tokens],
        alphabet=sorted(letters - set("\u65e5\u672cé")),
    )
    value = json.loads(backend.to_str())
    value["added_tokens"] = value["added_tokens"][:5]
    begin = processors.TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", 1)])
    return json.dumps(value | {"post_processor": json.loads(begin.__getstate__())})


def train(backend: Tokenizer, special: list[Any], alphabet: list[str] | None = None) -> None:
    letters = alphabet or pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=letters, show_progress=False)
    backend.train_from_iterator(
        [sentence.replace(" ", "▁") if alphabet else sentence for sentence in SENTENCES], trainer
    )


def write(folder: Path, settings: dict[str, Any], tokenizer: str, **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer)
    for name, value in {"tokenizer_config": settings, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def differences(folder: Path) -> list[Any]:
    """Return the differences between the tokenizers that this module and transformers read in `folder`."""
    full, own = load_tokenizer(str(folder)), read_folder(folder, str(folder))
    assert own is not None
    names = "name_or_path all_special_tokens special_tokens_map eos_token eos_token_id bos_token_id chat_template"
    found = [name for name in names.split() if getattr(full, name) != getattr(own, name)]
    found += ["added"] * (repr(full.added_tokens_decoder) != repr(own.added_tokens_decoder))
    found += ["vocabulary"] * (full.get_added_vocab() != own.get_added_vocab())
    found += ["fingerprint"] * (fingerprint(full) != fingerprint(own))
    if full.chat_template and (isinstance(full.chat_template, str) or "default" in full.chat_template):
        found += ["tools"] * (full.get_chat_template(tools=[{}]) != own.get_chat_template(tools=[{}]))
        found += ["template"] * (full.get_chat_template() != own.get_chat_template())
    theirs, ours = full.backend_tokenizer, own.backend_tokenizer
    for backend in (theirs, ours):  # as the encoder does
        backend.no_truncation()
        backend.no_padding()
    for text in texts():
        ids = encoded(theirs, text, special=False)
        is_same = ids == encoded(ours, text, special=False)
        is_same &= encoded(theirs, text, special=True) == encoded(ours, text, special=True)
        is_same &= isinstance(ids, str) or theirs.decode(ids, skip_special_tokens=False) == ours.decode(
            ids, skip_special_tokens=False
        )
        found += [] if is_same else [text]
    return found


def encoded(backend: Tokenizer, text: str, *, special: bool) -> list[int] | str:
    try:
        return list(backend.encode(text, add_special_tokens=special).ids)
    except Exception as error:  # no token for unknown characters
        return str(error)


@pytest.mark.parametrize("kind", sorted(DEFAULT_TOKENS))
@pytest.mark.parametrize("model", [None, "llama", "qwen2", "qwen3", "qwen3_5", "gemma3_text", "phi3", "gpt2"])
def test_every_class_equals_that_of_transformers(kind: str, model: str | None, tmp_path: Path) -> None:
    on_characters = kind in ("LlamaTokenizer", "GemmaTokenizer")
    files = {} if model is None else {"config": {"model_type": model}}
    folder = write(
        tmp_path / "t", {"tokenizer_class": kind}, character_model() if on_characters else byte_model(), **files
    )
    assert differences(folder) == []


token = st.sampled_from(["<|im_end|>", "<|endoftext|>", "<s>", "<new>", "<tag>", "[strip]", "<image>"])
flags = st.fixed_dictionaries({key: st.booleans() for key in ("lstrip", "rstrip", "normalized", "single_word")})
described = st.builds(lambda text, how: {"__type": "AddedToken", "content": text} | how, token, flags)
tokens = st.lists(token, max_size=3)
templates = st.sampled_from(
    ["T", [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}], {"default": "C"}]
)
roles = {role: st.none() | token | described for role in NAMED}
fields = {
    **roles,
    "add_bos_token": st.booleans(),
    "add_prefix_space": st.booleans(),
    "added_tokens_decoder": st.dictionaries(
        st.sampled_from(["0", "1", "300", "900"]),
        st.builds(lambda text, how, special: {"content": text, "special": special} | how, token, flags, st.booleans()),
        max_size=3,
    ),
    "additional_special_tokens": tokens,
    "boi_token": token,
    "chat_template": templates,
    "clean_up_tokenization_spaces": st.booleans(),
    "extra_special_tokens": tokens | st.dictionaries(st.sampled_from(["eoi_token", "image_token"]), token),
    "image_token": described,
    "legacy": st.booleans(),
    "model_max_length": st.just(10),
    "split_special_tokens": st.booleans(),
}


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    chosen = draw(st.sets(st.sampled_from(sorted(fields)), max_size=7))
    kind = draw(
        st.sampled_from([*DEFAULT_TOKENS, "PreTrainedTokenizerFast", "GPT2TokenizerFast", "LlamaTokenizerFast"])
    )
    return {"tokenizer_class": kind} | {key: draw(fields[key]) for key in sorted(chosen)}


maps = st.dictionaries(st.sampled_from(["eos_token", "pad_token", "image_token"]), token) | st.fixed_dictionaries(
    {
        "bos_token": st.builds(lambda text, how: {"content": text} | how, token, flags),
        "additional_special_tokens": tokens,
    }
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(configs(), st.none() | maps, st.none() | st.dictionaries(token, st.integers(1000, 1003)), st.booleans())
def test_every_field_counts_as_in_transformers(
    tmp_path: Path, config: dict[str, Any], special: Any, added: Any, padded: bool
) -> None:
    on_characters = config["tokenizer_class"].startswith(("Llama", "Gemma"))
    value = json.loads(character_model() if on_characters else byte_model(digits=padded))
    if padded:
        value["padding"] = json.loads(_padded().to_str())["padding"]
        value["truncation"] = json.loads(_padded().to_str())["truncation"]
    files = {"special_tokens_map": special, "added_tokens": added}
    for name in files:
        (tmp_path / f"{name}.json").unlink(missing_ok=True)
    folder = write(
        tmp_path, config, json.dumps(value), **{key: each for key, each in files.items() if each is not None}
    )
    if "added_tokens_decoder" not in config and (special is not None or added is not None):
        assert read_folder(folder, str(folder)) is None  # an old folder, which transformers reads
        return
    try:
        load_tokenizer(str(folder))
    except TreepackError:
        with pytest.raises(TreepackError):
            read_tokenizer(str(folder))
        return
    assert differences(folder) == []


def _padded() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.enable_padding(pad_token="<|endoftext|>", pad_id=0)
    backend.enable_truncation(8)
    return backend


def test_templates_in_files_count_before_those_of_the_config(tmp_path: Path) -> None:
    folder = write(tmp_path, {"tokenizer_class": AS_IT_IS, "chat_template": "C"}, byte_model())
    (folder / "chat_template.jinja").write_text("F\r\n")
    assert differences(folder) == []
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("U")
    assert differences(folder) == []
    (folder / "chat_template.jinja").unlink()
    assert differences(folder) == []


def test_the_tokenizer_of_the_sample_data_equals_transformers() -> None:
    folder = ROOT / "sample_data" / "tokenizer"
    assert differences(folder) == []
    # A page of a report finds the messages with it.
    headers = learn_headers(read_folder(folder, "t"))
    assert headers == learn_headers(load_tokenizer(str(folder)))
    assert {header.role for header in headers} >= {"user", "assistant"}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"tokenizer_class": "BertTokenizer"},
        {"tokenizer_class": AS_IT_IS, "auto_map": {"AutoTokenizer": ["a.B", None]}},
        {"tokenizer_class": AS_IT_IS, "fix_mistral_regex": True},
        {"tokenizer_class": AS_IT_IS, "unheard_of": 1},
    ],
)
def test_what_is_not_known_to_be_equal_is_left_to_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    assert read_folder(write(tmp_path, config, byte_model()), "t") is None
    write(tmp_path, {"tokenizer_class": AS_IT_IS}, byte_model())
    assert read_folder(tmp_path, "t") is not None
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    assert read_folder(tmp_path, "t") is None


def test_a_folder_without_a_tokenizer_file_is_left_to_transformers(tmp_path: Path) -> None:
    folder = write(tmp_path, {"tokenizer_class": AS_IT_IS}, byte_model())
    (folder / "tokenizer.json").unlink()
    assert read_folder(folder, "t") is None


def test_a_damaged_file_has_the_error_of_transformers(tmp_path: Path) -> None:
    folder = write(tmp_path, {"tokenizer_class": AS_IT_IS}, "{")
    with pytest.raises(TreepackError) as theirs:
        load_tokenizer(str(folder))
    with pytest.raises(TreepackError) as ours:
        read_tokenizer(str(folder))
    assert str(ours.value) == str(theirs.value)


def test_models_have_the_classes_of_transformers() -> None:
    from transformers.models.auto import configuration_auto, tokenization_auto

    registered = tokenization_auto.TOKENIZER_MAPPING_NAMES
    known = {model: kind for model, kind in CLASS_OF_MODEL.items() if model}
    assert known == {model: registered.get(model) for model in known}
    wrong = tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    assert wrong.intersection(known) == WRONGLY_NAMED
    # transformers has code of its own for each, so it never runs code that a config.json names.
    assert known.keys() <= configuration_auto.CONFIG_MAPPING_NAMES.keys()


def test_no_known_field_is_a_method_of_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path, PLAIN))  # transformers refuses such a field
    assert [field for field in FIELDS if callable(getattr(tokenizer, field, None))] == []


PROGRAM = """
import sys, treepack_cli
try:
    treepack_cli.main()
finally:
    print("imported:", *sorted({"torch", "transformers", "httpx"} & {name.partition(".")[0] for name in sys.modules}))
"""


def test_chat_files_are_read_without_importing_transformers(tmp_path: Path) -> None:
    rollout = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(rollout) + "\n")
    arguments = ["build-trie", "chat.jsonl", "--tokenizer", str(ROOT / "sample_data" / "tokenizer"), "--out", "trie"]
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "imported:"
    assert (tmp_path / "trie" / "manifest.json").exists()


def test_a_model_of_the_hub_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model, revision = tmp_path / "models--owner--name", "c0ffee" + 34 * "0"
    write(
        model / "snapshots" / revision, {"tokenizer_class": AS_IT_IS, "chat_template": "T"}, byte_model(), config=LLAMA
    )
    with pytest.raises(TreepackError, match="the Hugging Face hub cannot be reached"):
        read_tokenizer("owner/name")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(revision)
    full, own = load_tokenizer("owner/name"), read_tokenizer("owner/name")
    assert isinstance(own, FileTokenizer)
    assert not isinstance(full, FileTokenizer)
    assert fingerprint(full) == fingerprint(own)
    assert fingerprint(own)["name"] == "owner/name"
    assert own.chat_template == "T"


class Hub(BaseHTTPRequestHandler):
    """The part of the Hugging Face hub that the client calls; `files` are the files of the model owner/name."""

    files: ClassVar[dict[str, bytes]] = {}
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        """Send the list of files, or a file."""
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/owner/name/tree/main"):
            tree = [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in self.files.items()]
            self._send(json.dumps(tree).encode(), "application/json")
        else:
            self.asked.append(path.rpartition("/")[2])
            self._send(self.files.get(self.asked[-1]), "text/plain")

    def do_HEAD(self) -> None:
        """Send the head of a file."""
        self._send(b"" if self.path == "/" else self.files.get(self.path.rpartition("/")[2]), "text/plain", head=True)

    def log_message(self, *words: Any) -> None:
        """Log nothing."""

    def _send(self, data: bytes | None, kind: str, *, head: bool = False) -> None:
        self.send_response(404 if data is None else 200)
        self.send_header("X-Repo-Commit", 40 * "a")
        self.send_header("ETag", f'"{hash(data)}"')
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data or b"")))
        self.end_headers()
        if not head:
            self.wfile.write(data or b"")


def test_a_model_of_the_hub_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    config = json.dumps({"tokenizer_class": AS_IT_IS}).encode()
    model = json.dumps(LLAMA).encode()
    Hub.files = {"tokenizer.json": byte_model().encode(), "tokenizer_config.json": config, "config.json": model}
    Hub.files |= {"chat_template.jinja": b"T", "model.safetensors": b"large"}
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", place)
        template = f"{place}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        own = read_tokenizer("owner/name")
        server.shutdown()
    assert isinstance(own, FileTokenizer)
    assert own.chat_template == "T"
    assert sorted(Hub.asked) == ["chat_template.jinja", "config.json", "tokenizer.json", "tokenizer_config.json"]
    # Without the hub, the copy in the cache is read.
    assert is_offline("owner/name")
    again = read_tokenizer("owner/name")
    assert isinstance(again, FileTokenizer)
    assert fingerprint(again) == fingerprint(own)
