"""Sequences to a trie: in memory, from sorted runs on disk, and in ranges of several tasks."""
