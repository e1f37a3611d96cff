"""Commands under a pseudo-terminal, in one fresh process."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

END = "-- end of a command --"
SCRIPT = """
import json, sys
from treepack_cli import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["treepack", *words]
    try:
        main()
    except SystemExit:
        pass
    print(sys.argv[-1] and "END", flush=True)
"""


def on_terminal(folder: Path, *commands: list[str], environment: dict[str, str] | None = None) -> list[str]:
    """Run commands one after another in `folder` on one terminal; return what each has written there."""
    control, terminal = pty.openpty()
    words = [sys.executable, "-c", SCRIPT.replace("END", END), json.dumps(commands)]
    environment = {**os.environ, "TERM": "xterm", **(environment or {})}
    with subprocess.Popen(
        words, cwd=folder, stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    ) as process:
        os.close(terminal)
        written = b""
        try:
            while data := os.read(control, 4096):
                written += data
        except OSError:  # the other end of the terminal is closed
            pass
        assert process.wait() == 0, written.decode(errors="replace")
    os.close(control)
    return written.decode().replace("\r\n", "\n").split(f"{END}\n")[:-1]
