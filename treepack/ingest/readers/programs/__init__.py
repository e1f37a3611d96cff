"""Files and fields of single programs whose formats do not fit one file."""
