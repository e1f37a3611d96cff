"""Logs and traces of single calls of a model, from APIs and tracers."""
