"""Processor seconds that a small chat file takes longer than token ids of the same rollouts, before and after.

    python benchmarks/data_path/chat_start.py [--tokenizer FOLDER] [--repeats 5]       2 minutes

The conversations are few, so the difference is the time until the first one is tokenised: importing what reads the
tokenizer and renders the chat template. Each value is the median of the repeats; the last column is the median of the
differences within a repeat. The disk caches are as they come: cold in the first repeat, at best.
"""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path

from before_after import OUT, ROOT, Versions, arguments, treepack

WORDS = "the quick brown fox jumps over a lazy dog and runs home to read its mail".split()
CONVERSATIONS, TURNS = 50, 5


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "sample_data" / "tokenizer")
    parser.set_defaults(repeats=5)
    options = parser.parse_args()
    tokenizer = str(options.tokenizer.resolve())
    with Versions(options.before, options.folder, options.repeats) as versions:
        chat, tokens = versions.folder / "chat.jsonl", versions.folder / "tokens.jsonl"
        chat.write_text("".join(json.dumps(each) + "\n" for each in _conversations()))
        tokens.write_text("".join(json.dumps(each) + "\n" for each in _token_records(chat, tokenizer)))
        commands = {"stats": ["stats"], "build-trie": ["build-trie", "--out", OUT]}
        print("| command | version | token file, s | chat file, s | chat beyond tokens, s |")
        print("|---|---|---|---|---|")
        for name, (command, *more) in commands.items():
            runs: dict[str, list[tuple[float, float]]] = {"before": [], "after": []}
            for repeat in range(options.repeats):
                for side, costs in runs.items():
                    outs = [versions.folder / f"{name}-{side}-{repeat}-{kind}" for kind in ("tokens", "chat")]
                    lines = [treepack(command, tokens, *more), treepack(command, chat, "--tokenizer", tokenizer, *more)]
                    first, second = (
                        versions.measure(side, line, out).processor for line, out in zip(lines, outs, strict=True)
                    )
                    costs.append((first, second))
            for side, costs in runs.items():
                columns = [[a for a, _ in costs], [b for _, b in costs], [b - a for a, b in costs]]
                print(f"| {name} | {side} |", " | ".join(f"{statistics.median(each):.2f}" for each in columns), "|")


def _conversations() -> list[dict[str, object]]:
    generator = random.Random(0)

    def message(role: str, count: int) -> dict[str, str]:
        return {"role": role, "content": " ".join(generator.choices(WORDS, k=count))}

    return [
        {"messages": [each for _ in range(TURNS) for each in (message("user", 20), message("assistant", 30))]}
        for _ in range(CONVERSATIONS)
    ]


def _token_records(chat: Path, tokenizer: str) -> list[dict[str, object]]:
    from treepack.ingest.readers.reading import read_trajectories
    from treepack.ingest.tokenization import tokenize
    from treepack.trajectory import Tokens, Trajectory, positions

    records = []
    for item in tokenize(read_trajectories([chat]), tokenizer=tokenizer):
        assert isinstance(item, Trajectory)
        assert isinstance(item.content, Tokens)
        mask = [0] * len(item.content.tokens)
        for i in positions(item.content.starts, item.content.ends).tolist():
            mask[i] = 1
        ids = item.content.tokens.tolist()
        records.append({"id": item.trajectory_id, "group_id": item.group_id, "input_ids": ids, "loss_mask": mask})
    return records


if __name__ == "__main__":
    main()
