"""Input formats, a file each, in groups; `treepack.ingest.readers.registry` finds them, and nothing imports them."""
