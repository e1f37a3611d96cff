"""Spans of tracing systems as calls."""
