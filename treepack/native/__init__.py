"""Loops in C, compiled once when treepack is installed, each with a slow twin in Python."""
