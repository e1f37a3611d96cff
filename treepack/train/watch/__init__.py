"""Metrics of a run, and where they are sent."""
