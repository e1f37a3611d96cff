"""The memory that a command may use: an option, or half of the memory of this machine or container."""

from __future__ import annotations

import os
from pathlib import Path

# Limits of a container, of the second and the first version of control groups; "max" or a huge number is no limit.
_GROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def usual_memory() -> int:
    """Return half of the memory of this machine, or of the container if that has less, in bytes."""
    return _all_memory() // 2


def _all_memory() -> int:
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _GROUP_LIMITS:
        try:
            sizes.append(int(path.read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(sizes)
