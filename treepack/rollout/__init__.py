"""Sample rollouts as trees from any engine that continues token ids.

Query --sample_tree (Engine, TreeOptions)--> Tree --records--> lines that build-trie reads
"""
