"""Chat files by turns and as trajectories: made conversations of agents with 10, 100 and 500 answers, before and after.

    python benchmarks/data_path/chat_turns.py [--templates sample qwen3 qwen2_5] [--repeats 1] [--quick]

A row is one process of each version that tokenises some conversations. Its time is processor time without imports and
without the first conversation, for which the template is compiled. "distinct" tokens are those of the longest sample of
each conversation, so the rate does not count the tokens that prompts repeat. The program fails if the samples of the
two versions differ in any id, span, weight, name, group, note or sum.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from before_after import ROOT, Versions, arguments, program

from support.agent_chats import agent_chat

SAMPLE = ROOT / "sample_data" / "tokenizer"
ANSWERS = {10: 40, 100: 4, 500: 1}  # answers of a conversation -> conversations


def tokenise(folder: str, answers: int, number: int, expand: str, reasoning: bool) -> dict[str, Any]:
    """Tokenise conversations; return the seconds, the tokens, and the sha256 of the samples."""
    from treepack.ingest.tokenization import TokenisationJob, TrajectoryTokeniser, load_tokenizer
    from treepack.trajectory import Chat, Skipped, Trajectory

    def trajectory(answers: int, seed: int) -> Trajectory:
        messages = agent_chat(answers, seed=seed, reasoning=reasoning)
        weights = [float(message["role"] == "assistant") for message in messages]
        return Trajectory(f"t{seed}", f"made:{seed}", Chat(messages, weights))

    tokenisation = TrajectoryTokeniser(TokenisationJob(load_tokenizer(folder), expand))
    list(tokenisation(trajectory(12, 1000)))
    items = [trajectory(answers, seed) for seed in range(number)]
    seconds, distinct, flat, digest = 0.0, 0, 0, hashlib.sha256()
    for item in items:
        start = time.process_time()
        samples = list(tokenisation(item))
        seconds += time.process_time() - start
        longest = 0
        for sample in samples:
            if isinstance(sample, Skipped):
                sys.exit(f"{folder}: skipped: {sample.detail}")
            content: Any = sample.content
            names = (sample.trajectory_id, sample.group_id, sample.notes, sorted(sample.totals.items()))
            digest.update(repr((*names, sample.weight)).encode())
            for values in (content.tokens, content.starts, content.ends, content.span_weights):
                digest.update(values.tobytes())
            longest, flat = max(longest, len(content.tokens)), flat + len(content.tokens)
        distinct += longest
    return {"seconds": seconds, "distinct": distinct, "flat": flat, "sha256": digest.hexdigest()}


def save_template(name: str, folder: Path) -> str:
    """Return the folder of a tokenizer with the vocabulary of the sample and a template of trl."""
    if name == "sample":
        return str(SAMPLE)
    from support import real_templates

    return real_templates.save(name, folder / name)


def main() -> None:
    """Print the table, or as a worker a line of JSON."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--templates", nargs="+", default=["sample", "qwen3", "qwen2_5"], help="names of trl, or sample"
    )
    parser.add_argument("--quick", action="store_true", help="leave out conversations of 500 answers")
    parser.add_argument("--worker", nargs=5, help="tokenise: folder, answers, conversations, expand, reasoning")
    parser.set_defaults(repeats=1)
    options = parser.parse_args()
    if options.worker:
        folder, answers, number, expand, reasoning = options.worker
        print(json.dumps(tokenise(folder, int(answers), int(number), expand, reasoning == "reasoning")))
        return
    with Versions(options.before, options.folder, options.repeats) as versions:
        print("| template | answers | samples | ms an answer, before | after | distinct tokens/s | after | ratio |")
        print("|---|---|---|---|---|---|---|---|")
        for name in options.templates:
            folder = save_template(name, versions.folder)
            for answers, number in ANSWERS.items():
                for expand in ("turns", "trajectory"):
                    # The version before takes half a minute for each conversation of 500 answers.
                    if answers <= 100 or not (options.quick or (expand == "trajectory" and name != "sample")):
                        row(versions, name, folder, answers, number, expand)


def row(versions: Versions, name: str, folder: str, answers: int, number: int, expand: str) -> None:
    """Print one line of the table."""
    kind = "plain" if name == "sample" else "reasoning"
    command = program(Path(__file__).resolve(), "--worker", folder, answers, number, expand, kind)
    runs: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
    for _ in range(versions.repeats):
        for side in runs:
            runs[side].append(json.loads(versions.measure(side, command, versions.folder / "none").output))
    results = {side: min(each, key=lambda run: run["seconds"]) for side, each in runs.items()}
    before, after = results["before"], results["after"]
    if before["sha256"] != after["sha256"]:
        sys.exit(f"{name}, {answers} answers, {expand}: the samples differ")
    rates = [result["distinct"] / result["seconds"] / 1e3 for result in (before, after)]
    times = [result["seconds"] / answers / number * 1e3 for result in (before, after)]
    print(
        f"| {name}, {kind} | {answers} | {expand} | {times[0]:.2f} | {times[1]:.2f} "
        f"| {rates[0]:.0f} k | {rates[1]:.0f} k | {rates[1] / rates[0]:.1f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
