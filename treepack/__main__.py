"""`python -m treepack`: the command line, for launchers such as `torchrun -m treepack train ...`."""

from __future__ import annotations

from importlib import import_module

if __name__ == "__main__":
    # By its name, because the library never imports the command line.
    import_module("treepack_cli").main()
