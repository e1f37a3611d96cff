"""Settings of all tests.

One thread per process: the models are tiny and the tests run side by side, so more threads only wait for each other.
Hypothesis is derandomised, so that a run is repeatable, and has no deadlines, as machines differ.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

settings.register_profile("treepack", deadline=None, derandomize=True, max_examples=150)
settings.load_profile("treepack")
