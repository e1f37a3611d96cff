"""Call loops written in C, or their slow twins in Python if they were not compiled.

    @in_c(INT64, INT64, BOOL, returns=INT)
    def best_of(rooms, compared, best): ...     the slow twin, the specification of best_of() in a .c file

The decorated function calls the C function of the same name. Arrays are passed without a copy, each as a pointer and
its number of elements; integers are passed as int64_t and floats as double. C allocates nothing: results and scratch
are arrays that the caller has made.

    void best_of(const int64_t *rooms, int64_t num_rooms, int64_t compared, uint8_t *best, int64_t num_best)

All .c files of this folder are compiled into one shared library, `loops`, when treepack is installed. It uses nothing
of Python, so one build serves all versions. The library is optional: without a C compiler the installation succeeds,
and every decorated function runs its twin, which gives the same result up to 100 times slower, after one note.
The attribute `twin` of the function is always the twin; tests compare the two.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

_F = TypeVar("_F", bound=Callable[..., Any])

# Parameters of a C function: the element type of an array, or one number.
UINT8, BOOL, INT32, INT64, FLOAT64 = (np.dtype(name) for name in ("uint8", "bool", "int32", "int64", "float64"))
INT, FLOAT = int, float
_Parameter = np.dtype[Any] | type[int] | type[float]

_C_NUMBERS: dict[type, Any] = {int: ctypes.c_int64, float: ctypes.c_double}


def in_c(*parameters: _Parameter, returns: type[int] | type[float] | None = None) -> Callable[[_F], _F]:
    """Return a decorator that replaces a function by the C function of its name, with these parameters.

    A call raises TypeError if an array has another element type or is not contiguous; that is a bug of the caller.
    """

    def decorate(twin: _F) -> _F:
        symbol = getattr(_library(), twin.__name__, None)  # a library of an older version may lack it
        function = _warn_once(twin) if symbol is None else _bind(symbol, parameters, returns)
        function = functools.wraps(twin)(function)
        function.twin = twin  # type: ignore[attr-defined]
        return cast(_F, function)

    return decorate


def is_compiled() -> bool:
    """Return True if the loops were compiled when treepack was installed."""
    return _library() is not None


def _bind(symbol: Any, parameters: tuple[_Parameter, ...], returns: type | None) -> Callable[..., Any]:
    """Return a Python function that converts its arguments and calls `symbol`."""
    symbol.restype = None if returns is None else _C_NUMBERS[returns]
    symbol.argtypes = [kind for parameter in parameters for kind in _c_types(parameter)]

    def call(*arguments: Any) -> Any:
        values: list[Any] = []
        for argument, parameter in zip(arguments, parameters, strict=True):
            if isinstance(parameter, np.dtype):
                values += (_pointer(argument, parameter), argument.size)
            else:
                values.append(argument)
        return symbol(*values)

    return call


def _c_types(parameter: _Parameter) -> list[Any]:
    if isinstance(parameter, np.dtype):
        return [ctypes.c_void_p, ctypes.c_int64]
    return [_C_NUMBERS[parameter]]


def _pointer(array: NDArray[Any], dtype: np.dtype[Any]) -> int:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or not array.flags.c_contiguous:
        raise TypeError(f"expected a contiguous array of {dtype}")
    # array.ctypes.data is four times slower, which small trees feel; from_buffer takes no read-only or empty buffer.
    if array.flags.writeable and array.size:
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    address: int = array.ctypes.data
    return address


def _warn_once(twin: _F) -> _F:
    @functools.wraps(twin)
    def call(*arguments: Any) -> Any:
        _warn()
        return twin(*arguments)

    return cast(_F, call)


@functools.cache
def _warn() -> None:
    # Without a handler, logging writes the message alone to stderr; `warnings` would add a path and a line of code.
    logging.getLogger("treepack").warning(
        "note: treepack's loops in C are missing or do not fit this version, so packing takes up to 100 times longer; "
        "install a C compiler, then install treepack again"
    )


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the shared library beside this file, or None if it was not compiled."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:  # ".cpython-311-x86_64-linux-gnu.so", ".abi3.so", ".so"
        path = Path(__file__).with_name(f"loops{suffix}")
        if path.is_file():
            return ctypes.CDLL(str(path))
    return None
