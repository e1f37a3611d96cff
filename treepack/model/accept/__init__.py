"""Checks that models and rows can be computed exactly: by configuration, by a probe, and by the first batch."""
