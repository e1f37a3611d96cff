"""Readers: files of any known format to trajectories. `treepack.ingest.formats` has one file a format; this is what they share."""
