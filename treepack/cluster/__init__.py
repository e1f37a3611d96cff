"""Tries built by many machines: shares of the input of `build-trie` as tasks on a Ray cluster."""
