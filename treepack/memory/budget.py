"""The memory that a command may use: an option, or half of the memory of this machine or container."""

from __future__ import annotations

import os
from pathlib import Path

# Limits of a container, of the second and the first version of control groups; "max" or a huge number sets none.
_GROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_MACHINE = Path("/proc/meminfo")


def usual_memory() -> int:
    """Return half of the memory of this machine, or of the container if that has less, in bytes."""
    return _all_memory() // 2


def available_memory() -> int:
    """Return the bytes that processes may still take on this machine, or in the container if that has less left."""
    sizes = [_available_on_machine()]
    for limit, usage in zip(_GROUP_LIMITS, ("memory.current", "memory.usage_in_bytes"), strict=True):
        left = _left_in_group(limit, limit.parent / usage)
        if left is not None:
            sizes.append(left)
    return min(sizes)


def _available_on_machine() -> int:
    try:
        lines = _MACHINE.read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return _all_memory()
    # "MemAvailable:   12345 kB"
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), _all_memory())


def _left_in_group(limit: Path, usage: Path) -> int | None:
    """Return the bytes that a control group may still take; None without a limit."""
    try:
        left = int(limit.read_text()) - int(usage.read_text())
        statistics = dict(line.split() for line in (limit.parent / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such file, or "max"
        return None
    # The cache of files counts as used, and the kernel drops the inactive part of it first.
    cache = statistics.get("total_inactive_file") or statistics.get("inactive_file") or 0
    return max(0, left + int(cache))


def _all_memory() -> int:
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _GROUP_LIMITS:
        try:
            sizes.append(int(path.read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(sizes)
