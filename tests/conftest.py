"""Hypothesis profiles: derandomised, so that a run is repeatable; no deadlines, as machines differ."""

from hypothesis import settings

settings.register_profile("treepack", deadline=None, derandomize=True, max_examples=150)
settings.load_profile("treepack")
