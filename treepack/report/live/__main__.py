"""The page of a run as a separate process: `python -m treepack.report.live RUN`.

It writes the address of the page as its first line to stdout, and ends when its stdin ends: with the process that
started it, however that ends. A resumed run has the address of its page before, if no other program has taken it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from treepack.analysis.options import ReportOptions
from treepack.errors import TreepackError
from treepack.report.live.page_address import PageAddress
from treepack.report.live.run_state import RunFolder
from treepack.report.live.server import RunServer
from treepack.report.live.start_log import start_file
from treepack.report.live.watch import RunWatch


def main() -> int:
    """Serve the page of the run that is the first argument."""
    # Ctrl-C in a terminal goes to all its processes: the trainer ends in order, and this process after it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)  # the trainer goes first
    ended = threading.Event()
    try:
        folder = RunFolder(Path(sys.argv[1]), is_alive=lambda: not ended.is_set())
        # The folder of a run in a store is new for every command, and has no file of the start.
        kept = PageAddress(folder.path) if start_file(folder.path).exists() else None
        earlier = kept.read() if kept else ""
        server = RunServer(RunWatch(folder, text_limit=ReportOptions().text_limit), earlier=earlier)
        moved = "" if earlier in ("", server.url) else " (another program has taken the port of its earlier address)"
        print(f"{server.url}{moved}", flush=True)
        if kept:
            kept.write(server.url)
        threading.Thread(target=_stop_after_stdin, args=(server, ended), daemon=True).start()
        server.serve()
        if kept and folder.finished() is not None:
            kept.remove()
    except TreepackError as error:
        print(f"treepack: {error}", file=sys.stderr)
        return 1
    return 0


def _stop_after_stdin(server: RunServer, ended: threading.Event) -> None:
    while sys.stdin.buffer.read(1 << 16):
        pass
    ended.set()
    server.stop()


if __name__ == "__main__":
    sys.exit(main())
