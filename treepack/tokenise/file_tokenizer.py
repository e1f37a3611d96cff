"""Read a tokenizer from its files with `tokenizers` alone, because importing transformers takes seconds.

    tokenizer.json                 the backend: vocabulary, merges, steps on the text, added tokens
    tokenizer_config.json          special tokens, further added tokens, chat template
    chat_template.jinja            the chat template, or several in additional_chat_templates/
    special_tokens_map.json        if one is there and the config lists no added tokens, as in old folders, transformers
    added_tokens.json              reads the folder
    config.json                    the type of the model, by which transformers chooses a class (`tokenizer_classes`)

Ids, special tokens, templates and fingerprint are as in `transformers.AutoTokenizer`, with which the tests compare
them. `read_folder` returns None for everything that may differ; then transformers reads the folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from treepack.tokenise.template.rendering import templates_in
from treepack.tokenise.tokenizer_classes import DEFAULT_TOKENS, built, class_of

# Files that `read_folder` reads; all else in a folder changes nothing.
_OLD_FILES = ("special_tokens_map.json", "added_tokens.json")
FILES = (
    *"tokenizer.json tokenizer_config.json config.json chat_template.jinja additional_chat_templates/*.jinja".split(),
    *_OLD_FILES,
)
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Fields of tokenizer_config.json that `read_folder` treats as transformers does, besides fields that end in _token.
# Most change neither ids nor templates. A tokenizer with another field is left to transformers.
FIELDS = frozenset(
    (
        "add_bos_token add_eos_token add_prefix_space added_tokens_decoder additional_special_tokens backend bos_token "
        "chat_template clean_up_tokenization_spaces cls_token eos_token errors extra_special_tokens is_local legacy "
        "local_files_only mask_token max_length model_input_names model_max_length name_or_path pad_to_multiple_of "
        "pad_token pad_token_type_id padding_side processor_class sep_token sp_model_kwargs "
        "spaces_between_special_tokens special_tokens_map_file split_special_tokens stride tokenizer_class "
        "tokenizer_file truncation_side truncation_strategy unk_token use_default_system_prompt"
    ).split()
)
_Token = str | AddedToken


class FileTokenizer:
    """The part of a fast tokenizer of transformers that tokenisation uses, under the same names."""

    def __init__(
        self,
        name: str,
        backend: Tokenizer,
        special: Mapping[str, _Token],
        extra: Iterable[_Token],
        chat_template: str | dict[str, str] | None,
    ) -> None:
        """Take the backend, the special tokens that have a name such as `eos_token`, and the other special tokens."""
        self.name_or_path = name
        self.backend_tokenizer = backend
        self.chat_template = chat_template
        self.special_tokens_map = {role: str(token) for role, token in special.items()}
        self._extra = [str(token) for token in extra]

    @property
    def all_special_tokens(self) -> list[str]:
        """The special tokens, each once."""
        return list(dict.fromkeys([*self.special_tokens_map.values(), *self._extra]))

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The added tokens by id."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    @property
    def eos_token(self) -> str | None:
        """The token that ends a text or a turn."""
        return self.special_tokens_map.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id of `eos_token`."""
        return self._id("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """The id of the token that begins a text."""
        return self._id("bos_token")

    def get_chat_template(self, tools: Any = None) -> str:
        """Return the chat template for conversations with `tools`, or without if they are None; there must be one."""
        named = self.chat_template
        if isinstance(named, dict):
            return named["tool_use" if tools is not None and "tool_use" in named else "default"]
        assert named is not None
        return named

    def get_vocab(self) -> dict[str, int]:
        """Return the id of every token, added tokens included."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def get_added_vocab(self) -> dict[str, int]:
        """Return the id of every added token."""
        return {token.content: i for i, token in sorted(self.added_tokens_decoder.items())}

    def __len__(self) -> int:
        """Return the number of tokens, added tokens included."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def _id(self, role: str) -> int | None:
        token = self.special_tokens_map.get(role)
        return None if token is None else self.backend_tokenizer.token_to_id(token)


def read_folder(folder: Path, name: str) -> FileTokenizer | None:
    """Read the tokenizer in `folder`, which is called `name`, or return None if transformers has to read it.

    Raises:
        Exception: a file is damaged; transformers names the fault.
    """
    file, config = folder / "tokenizer.json", _read_json(folder / "tokenizer_config.json")
    if config is None or not file.is_file() or any(key not in FIELDS and not _is_role(key) for key in config):
        return None
    if "added_tokens_decoder" not in config and any((folder / old).is_file() for old in _OLD_FILES):
        return None
    kind = class_of(config, _read_json(folder / "config.json"), lambda: b'"ByteLevel"' in file.read_bytes())
    if kind is None:
        return None
    source = Tokenizer.from_file(str(file))
    added, special, extra = _tokens(config, source, DEFAULT_TOKENS[kind])
    backend = built(kind, source, config | special)
    if backend is None:
        return None
    backend.encode_special_tokens = config.get("split_special_tokens", False)
    _add_tokens(backend, added, special, extra)
    if kind == "Qwen2Tokenizer":  # its class makes every special token special, even if the file differs
        texts = dict.fromkeys(str(token) for token in [*special.values(), *extra])
        backend.add_tokens([AddedToken(text, special=True) for text in texts])
    return FileTokenizer(name, backend, special, extra, templates_in(folder, config))


def _tokens(
    config: Mapping[str, Any], source: Tokenizer, default: Mapping[str, str | None]
) -> tuple[dict[int, AddedToken], dict[str, _Token], list[_Token]]:
    """Return the added tokens by id, the special tokens by role, and the special tokens without a role.

    The order of the steps decides which of several definitions of a token counts; it is that of transformers.
    """
    fields = dict(config)
    if "additional_special_tokens" in fields and not fields.get("extra_special_tokens"):
        fields["extra_special_tokens"] = fields.pop("additional_special_tokens")
    # Roles that only this model has, for example image_token.
    own = {key: fields.pop(key) for key in list(fields) if _is_own_role(key) and isinstance(fields[key], str)}
    if isinstance(fields.get("extra_special_tokens"), dict):  # {"image_token": "<image>"}
        own |= fields.pop("extra_special_tokens")
    added = source.get_added_tokens_decoder()
    if "added_tokens_decoder" in fields:
        added = {int(i): AddedToken(**token) for i, token in fields["added_tokens_decoder"].items()}
    fields = {key: _converted(value) for key, value in fields.items()}
    by_text = {str(token): token for token in added.values()}
    for role in NAMED:
        if fields.get(role) is not None:
            fields[role] = by_text.get(str(fields[role]), fields[role])
    fields = dict(default) | fields
    if source.padding is not None:
        fields.setdefault("pad_token", source.padding["pad_token"])
    special = {role: fields[role] for role in NAMED if fields.get(role) is not None}
    special |= {key: value for key, value in fields.items() if _is_own_role(key) and isinstance(value, _Token)}
    special |= _converted(own)
    extra = list(fields.get("extra_special_tokens", fields.get("additional_special_tokens")) or [])
    if not all(isinstance(token, _Token) for token in [*special.values(), *extra]):
        raise TypeError("a special token is neither a text nor a token")
    return added, special, extra


def _add_tokens(
    backend: Tokenizer, added: Mapping[int, AddedToken], special: Mapping[str, _Token], extra: list[_Token]
) -> None:
    """Add all tokens to `backend`: first the tokens with ids, in order, then special tokens that it lacks."""
    tokens: list[_Token] = [added[i] for i in sorted(added)]
    known = {token.content for token in backend.get_added_tokens_decoder().values()} | {str(token) for token in tokens}
    for token in [*special.values(), *extra]:
        if str(token) not in known and token not in tokens:
            tokens.append(token)
    roles = {str(token) for token in special.values()}
    for k, token in enumerate(tokens):
        if isinstance(token, str):
            tokens[k] = AddedToken(token, special=True)
        elif str(token) in roles:
            token.special = True
    if tokens:
        backend.add_tokens(tokens)


def _is_role(key: str) -> bool:
    return key.endswith("_token")


def _is_own_role(key: str) -> bool:
    return _is_role(key) and key not in NAMED


def _converted(value: Any) -> Any:
    """Return `value` with tokens in place of their descriptions: {"__type": "AddedToken", "content": "<s>", ...}."""
    if isinstance(value, dict):
        if value.get("__type") == "AddedToken":
            return AddedToken(**{key: each for key, each in value.items() if key != "__type"})
        return {key: _converted(each) for key, each in value.items()}
    return [_converted(each) for each in value] if isinstance(value, list) else value


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if the file does not exist."""
    if not path.is_file():
        return None
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value
