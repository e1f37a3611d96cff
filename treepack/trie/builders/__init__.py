"""Sequences to a trie: in memory, from sorted runs on disk, and merged from tries of shares."""
