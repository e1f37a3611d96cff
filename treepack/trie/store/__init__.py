"""A trie in files: written, read and mapped."""
