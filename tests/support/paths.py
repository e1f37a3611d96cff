"""Folders that tests read from: the checkout, its samples, and real rollouts if they are beside the checkout."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
SAMPLE_DATA = ROOT / "sample_data"
ROLLOUTS = TESTS / "rollouts"  # one sample per input format
REAL = ROOT.parent / "shared" / "data"
