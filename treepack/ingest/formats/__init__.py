"""One file per input format; `registry` lists them."""
