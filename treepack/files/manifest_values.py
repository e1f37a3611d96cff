"""Check the values of a manifest whose entries have their types: numbers are in their range, texts known ones.

    read_manifest --check_values--> nothing, or one sentence that names the entry

Commands compute with these values before they read a part, so a total that is a text must be found here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
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
    for check in (_check_numbers, _check_texts, _check_lists, _check_others):
        for name, value, is_good in check(manifest):
            if not is_good:
                name = name if len(name) <= _MAX_ENTRY else f"{name[:_MAX_ENTRY]}..."
                raise TreepackError(f"{path}: is damaged ({name} is {quoted_value(value)}); write the directory again")


_Checks = Iterator[tuple[str, Any, bool]]  # the name of an entry, its value, and whether it is good


def _check_numbers(manifest: Mapping[str, Any]) -> _Checks:
    for name, value in manifest["totals"].items():
        yield f"totals.{name}", value, _is_count(value) if name.startswith(_COUNTED) else _is_number(value)
    for name, value in manifest["counts"].items():
        yield f"counts.{name}", value, _is_count(value)
    for name, check in _VALUES.items():
        if name in manifest:
            yield name, manifest[name], check(manifest[name])
    for name, check in _OPTIONS.items():
        if (value := manifest["options"].get(name)) is not None:
            yield f"options.{name}", value, check(value)


def _check_texts(manifest: Mapping[str, Any]) -> _Checks:
    for name, entry in manifest.items():
        if isinstance(entry, dict) and name in _TEXTS:
            for key in _TEXTS[name]:
                yield f"{name}.{key}", entry.get(key), _is_text(entry.get(key, ""))
    for number, part in enumerate(manifest["files"]):
        for key in ("rows", "bytes"):
            yield f"files[{number}].{key}", part[key], _is_count(part[key])


def _check_lists(manifest: Mapping[str, Any]) -> _Checks:
    for name, keys in _LISTS.items():
        for key, fields in keys.items():
            for number, item in enumerate((manifest.get(name) or {}).get(key, ())):
                is_good = isinstance(item, dict) and all(isinstance(item.get(field), str) for field in fields)
                yield f"{name}.{key}[{number}]", item, is_good if fields else isinstance(item, str)


def _check_others(manifest: Mapping[str, Any]) -> _Checks:
    """Check the template, whose text may be several by name, and the temperatures of recorded log-probabilities."""
    text = (manifest.get("chat_template") or {"text": ""}).get("text")
    named = text if isinstance(text, dict) else {"default": text}
    is_good = named.keys() <= {"default", "tool_use"} and all(isinstance(each, str) for each in named.values())
    yield "chat_template.text", text, is_good and "default" in named
    for name, entry in (manifest.get("logprobs") or {}).items():
        temperature = entry.get("temperature", 1.0) if isinstance(entry, dict) else None
        yield f"logprobs.{name}", entry, _is_number(temperature) or isinstance(temperature, str)


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
