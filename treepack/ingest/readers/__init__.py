"""Readers: files of any known format to trajectories. `formats/` has one file per format; the rest is shared."""
