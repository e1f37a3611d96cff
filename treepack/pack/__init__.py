"""A trie to training rows: plans, the order of branches, the columns of each row, packed files and their check."""
