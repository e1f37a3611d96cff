"""Tries and rows made by many machines: stages of `build-trie` and `pack` as tasks, and programs that run them."""
