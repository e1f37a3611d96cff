"""Trainers of other projects on trees: one module for each, which imports that project."""
