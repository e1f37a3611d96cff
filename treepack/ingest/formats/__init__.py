"""Input formats, in a file each or as lines of columns; `readers.registry` finds them, and nothing imports them."""
