"""Jobs for the worker processes of tests. This module does not import pytest, which would take longer than a job."""

from __future__ import annotations

import os
import sys
import time


class Divide:
    """Divide by a number; a large number takes long, so that later results arrive before earlier ones."""

    def __init__(self, numerator: int) -> None:
        self.numerator = numerator

    def __call__(self, number: int) -> float:
        if number > 5:
            time.sleep(0.05)
        return self.numerator / number


class Modules:
    def __init__(self, job: None) -> None:
        pass

    def __call__(self, name: str) -> bool:
        return sys.modules.get(name) is not None


class Process:
    def __init__(self, job: None) -> None:
        pass

    def __call__(self, piece: int) -> int:
        return os.getpid()


class Echo:
    def __init__(self, job: None) -> None:
        pass

    def __call__(self, piece: bytes) -> bytes:
        return piece


class Wait:
    def __init__(self, job: None) -> None:
        pass

    def __call__(self, piece: int) -> None:
        if piece:
            time.sleep(600)


class Die:
    def __init__(self, job: None) -> None:
        pass

    def __call__(self, piece: int) -> None:
        os._exit(1)


class Sum:
    """The state of a process: the sum of all numbers that it got."""

    def __init__(self, start: int) -> None:
        self.value = start


def add(state: Sum, number: int) -> int:
    state.value += number
    return number


def value(state: Sum, _: None) -> int:
    return state.value
