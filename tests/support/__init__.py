"""Oracles (slow, obvious twins), hypothesis strategies and helpers of the tests."""
