"""Readers: files of any known format to trajectories. `treepack.formats` has the formats.

    registry, recognition, unknown_formats, suggestions       which format a file has
    fields/ messages/ tokens/ columns/                        shared by formats, as is `treepack.calls`
    reading                                                   inputs to trajectories, in parts that workers can read

No file here imports a format: `registry` finds them.
"""
