"""Metrics of a run, and the trackers that receive them."""
