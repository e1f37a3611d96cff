"""Check the values of a manifest whose entries have their types: numbers are in their range, texts known ones.

    read_manifest --check_values--> nothing, or one sentence that names the entry

Commands compute with these values before they read a part, so a total that is a text must be found here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from treepack.errors import TreepackError, quoted_value

_MAX_ENTRY = 120  # characters of the name of an entry in an error
_MAX_TEXT = 1 << 12  # characters of a name or a path, as long as the longest path of Linux
_LIMIT = 1 << 63


def check_values(manifest: Mapping[str, Any], path: str) -> None:
    """Check the values of a manifest with the entries of its format.

    Raises:
        TreepackError: naming the entry.
    """
    for name, value in manifest["totals"].items():
        is_good = _is_count(value) if name.startswith(_COUNTED) else _is_number(value)
        _require(is_good, path, f"totals.{name}", value)
    for name, value in manifest["counts"].items():
        _require(_is_count(value), path, f"counts.{name}", value)
    for name, check in _VALUES.items():
        if name in manifest:
            _require(check(manifest[name]), path, name, manifest[name])
    for name, check in _OPTIONS.items():
        if manifest["options"].get(name) is not None:
            _require(check(manifest["options"][name]), path, f"options.{name}", manifest["options"][name])
    for name, entry in manifest.items():
        if isinstance(entry, dict) and name in _TEXTS:
            for key in _TEXTS[name]:
                _require(_is_text(entry.get(key, "")), path, f"{name}.{key}", entry.get(key))
    for number, part in enumerate(manifest["files"]):
        for key in ("rows", "bytes"):
            _require(_is_count(part[key]), path, f"files[{number}].{key}", part[key])
    for name, keys in _LISTS.items():
        for key, fields in keys.items():
            for number, item in enumerate((manifest.get(name) or {}).get(key, ())):
                good = isinstance(item, dict) and all(isinstance(item.get(field), str) for field in fields)
                _require(good if fields else isinstance(item, str), path, f"{name}.{key}[{number}]", item)
    text = (manifest.get("chat_template") or {"text": ""}).get("text")
    named = text if isinstance(text, dict) else {"default": text}
    good = named.keys() <= {"default", "tool_use"} and all(isinstance(each, str) for each in named.values())
    _require(good and "default" in named, path, "chat_template.text", text)
    for name, entry in (manifest.get("logprobs") or {}).items():
        temperature = entry.get("temperature", 1.0) if isinstance(entry, dict) else None
        good = _is_number(temperature) or isinstance(temperature, str)
        _require(isinstance(entry, dict) and good, path, f"logprobs.{name}", entry)


def _require(is_good: bool, path: str, name: str, value: Any) -> None:
    if not is_good:
        name = name if len(name) <= _MAX_ENTRY else f"{name[:_MAX_ENTRY]}..."
        raise TreepackError(f"{path}: is damaged ({name} is {quoted_value(value)}); write the directory again")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LIMIT


def _is_number(value: Any) -> bool:
    return _is_count(value) or (type(value) is float and math.isfinite(value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT


def _one_of(*names: str) -> Callable[[Any], bool]:
    return lambda value: value in names


_COUNTED = ("num_", "tokens_", "tiles_", "lower_bound")  # names of totals that are not ratios begin so

# Entries of any manifest, and options that later commands read.
_VALUES: dict[str, Callable[[Any], bool]] = {
    "capacity": lambda value: _is_count(value) and value > 0,
    "max_token_id": lambda value: _is_count(value) and value < 1 << 31,
    "share": _one_of("all", "group", "none"),
}
_OPTIONS: dict[str, Callable[[Any], bool]] = {
    "semantics": _one_of("branch", "once"),
    "normalize": _one_of("token", "trajectory", "group"),
    "too_long": _one_of("error", "drop", "truncate"),
    "balance": lambda value: _is_count(value) and value > 0,
    "partitions": _is_count,
    "pairs_budget": _is_number,
    "method": _is_text,
}
_TEXTS = {"trie": ("path", "sha256"), "skipped": ("main_reason",)}
_TEXTS |= dict.fromkeys(("tokenizer", "chat_template"), ("name", "sha256"))
# Lists of objects with these texts; without one, lists of texts.
_LISTS: dict[str, dict[str, tuple[str, ...]]] = {
    "skipped": {"rollouts": ("source", "reason"), "groups": ()},
    "control_tokens": {"rollouts": ("source", "note")},
}
