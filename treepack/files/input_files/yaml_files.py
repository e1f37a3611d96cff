"""YAML documents as plain values: logs of older versions of ART, which later changed to JSON.

    bytes --events--> size and depth are checked --load--> value --> keys of objects become text, as in JSON

A few bytes of YAML can expand to gigabytes, because an alias repeats a part of the document by its name, and deep
nesting overflows the stack of the parser. Both are refused before any value is made.
"""

from __future__ import annotations

from typing import Any

from treepack.errors import TreepackError

SUFFIXES = frozenset({".yaml", ".yml"})
_MAX_DEPTH = 200  # of nested lists and objects: far from the depths at which Python or the C parser overflow
# Size to which aliases may expand a document, as a multiple of its bytes. An honest file repeats a list of tools or a
# prompt for each rollout; a bomb of eight levels multiplies its size by millions.
_MAX_EXPANSION, _SMALL = 100, 1 << 20


def read_yaml(data: bytes, path: str) -> Any:
    """Return the one document of the file `path` with the bytes `data`.

    Raises:
        TreepackError: pyyaml is not installed, or the file is damaged, has more than plain values, is nested too
            deeply, or is much larger than its bytes because of aliases.
    """
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise TreepackError(f"{path}: is YAML; install pyyaml or write it as JSONL") from None
    # The safe loader creates no objects of classes; its C version is faster, but not every pyyaml has it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        fault = _fault(yaml, data, loader)
        if fault is None:
            return _with_text_keys(yaml.load(data, Loader=loader), {})
    except MemoryError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        fault = " ".join(str(error).split())
    except Exception as error:  # `!!bool maybe` is a KeyError, `!!int ""` an IndexError
        fault = f"a value does not fit its tag: {type(error).__name__} {error}"
    raise TreepackError(f"{path}: not YAML of plain values ({fault}); fix it or write it as JSONL")


def _fault(yaml: Any, data: bytes, loader: Any) -> str | None:
    """Return the reason why a document must not be loaded, or None; O(bytes), without recursion."""
    limit = max(_SMALL, _MAX_EXPANSION * len(data))
    sizes: dict[str, int] = {}  # of the parts with a name, after the replacement of aliases
    parents: list[tuple[str | None, int]] = []  # name, and size until then, of each open list or object
    # a: &x [1, 2]   b: [*x, *x]  ->  x has size 3, and b has 1 + 3 + 3
    size = 0
    for event in yaml.parse(data, Loader=loader):
        name = getattr(event, "anchor", None)
        if isinstance(event, yaml.CollectionStartEvent):
            parents.append((name, size))
            size = 0
            if len(parents) > _MAX_DEPTH:
                return f"nested more than {_MAX_DEPTH} deep"
        elif isinstance(event, yaml.CollectionEndEvent):
            name, before = parents.pop()
            size += 1
            if name is not None:
                sizes[name] = size
            size += before
        elif isinstance(event, yaml.AliasEvent):
            if name not in sizes:
                return f"alias {name} is inside of what it repeats, or stands for nothing"
            size += sizes[name]
        elif isinstance(event, yaml.ScalarEvent):
            size += 1 + len(event.value)
            if name is not None:
                sizes[name] = 1 + len(event.value)
        if size > limit:
            return f"its aliases expand {len(data):,} bytes to more than {limit:,}"
    return None


def _with_text_keys(value: Any, done: dict[int, Any]) -> Any:
    """Return `value` with the keys of all objects as text; a part that aliases repeat stays one object."""
    if not isinstance(value, dict | list):
        return value
    if id(value) not in done:
        if isinstance(value, dict):
            done[id(value)] = {str(key): _with_text_keys(part, done) for key, part in value.items()}
        else:
            done[id(value)] = [_with_text_keys(part, done) for part in value]
    return done[id(value)]
