"""A trie in files: written, read, mapped, and read in slices."""
