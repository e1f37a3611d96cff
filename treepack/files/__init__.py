"""Formats on disk, independent of tries and rows: schemas, manifests, whole-or-absent outputs, part files."""
