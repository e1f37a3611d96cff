"""The prefix trie: its value and walks, building it in memory and out of core, its files and its check."""
