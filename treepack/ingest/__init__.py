"""Raw files to tokenised trajectories: options, the readers of all formats, and one stream with counts.

records of files --readers/--> messages, text or ids --treepack.tokenise--> ids --stream--> columns for tries

options, column_map         options of `build-trie`; the value of --columns
read_log, conversations     counts and names of used and skipped rollouts; an entry of the manifest
array_rollouts              trajectories from arrays in memory
"""
