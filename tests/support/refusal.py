"""The sentence with which a call is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from treepack.errors import TreepackError


def refusal(function: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """Call `function` with the arguments, and return the sentence of its TreepackError; fail if it raises none."""
    with pytest.raises(TreepackError) as caught:
        function(*arguments, **options)
    return str(caught.value)
