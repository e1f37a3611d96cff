"""Input formats, one file each; `readers.registry` finds them, and nothing imports them."""
