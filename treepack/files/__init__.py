"""Formats on disk that know neither tries nor rows: schemas, manifests, whole-or-absent outputs, part files."""
