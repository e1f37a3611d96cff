"""The tutorial docs/first-loop.md runs as it stands, and its model gets better."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

PAGE = (ROOT / "docs" / "first-loop.md").read_text()


def pass_rate(path: Path) -> float:
    rewards = [json.loads(line)["reward"] for line in path.read_text().splitlines()]
    assert len(rewards) == 400
    return float(sum(rewards) / len(rewards))


@pytest.mark.slow
def test_the_commands_of_the_page_make_the_model_better(tmp_path: Path) -> None:
    (tmp_path / "sample_data").symlink_to(ROOT / "sample_data")
    # The first block of commands is a summary without arguments.
    blocks = re.findall(r"^```(python|sh)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1:]
    assert [language for language, _ in blocks] == ["python", "sh", "sh", "sh", "sh"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    for language, text in blocks:
        command = [sys.executable, "-c", text] if language == "python" else ["bash", "-euo", "pipefail", "-c", text]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
    before, after = (pass_rate(tmp_path / f"{name}.jsonl") for name in ("before", "after"))
    assert 0.4 < before < 0.75
    assert after > before + 0.15
