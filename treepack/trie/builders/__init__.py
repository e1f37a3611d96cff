"""Sequences to a trie: in memory, and from sorted runs on disk, which several processes merge."""
