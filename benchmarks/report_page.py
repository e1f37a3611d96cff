"""The page of `treepack report` on many rollouts: its size, the time to make it, and its response times in Chromium.

    python benchmarks/report_page.py [--groups 6250]     needs the development install and Chromium; prints a table

Data: groups of 16 rollouts with one system prompt of 300 tokens. Each group has a question of 30 to 90 tokens. A
rollout has two turns, each one of three that its group shares, and a last turn of its own, 20 to 160 tokens each, cut
out of sample_data; rewards are 0 and 1. Times in the browser are the median of three visits of a new page.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from measure import commit
from selenium.webdriver.chrome.webdriver import WebDriver

from treepack.costs.model_cost import read_shape
from treepack.report.contents import read_contents
from treepack.report.figures import ReportSubject, measure
from treepack.report.page import render_page
from treepack.tokenise.tokenization import load_tokenizer
from treepack.trajectory import Int32, Tokens, Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import Trie

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.browser import chromium, look, wait

ROOT = Path(__file__).parents[1]
PER_GROUP = 16
TEXT_LIMIT = 8_000_000  # the default of --text-limit
STEPS = {
    "a search by rollout id": "const s = document.getElementById('search'); s.value = 'rollout-7-3';"
    "s.dispatchEvent(new Event('input'))",
    "opening the rollout": "document.querySelector('#hits button').click()",
    "opening another group": "document.querySelectorAll('#rows .open')[0].click()",
}


def rollouts(groups: int, corpus: Int32) -> list[Trajectory]:
    """Return rollouts as described above."""
    random = np.random.default_rng(0)

    def phrase(low: int, high: int) -> Int32:
        size = int(random.integers(low, high))
        start = int(random.integers(0, len(corpus) - size))
        return corpus[start : start + size]

    system, result = phrase(300, 301), []
    for group in range(groups):
        prompt = np.concatenate([system, phrase(30, 90)])
        # Three versions of each of two turns: 9 ways through a group, so that 16 rollouts share and branch.
        turns = [[phrase(20, 140) for _ in range(3)] for _ in range(2)]
        rate = random.random()  # some groups are easy, some hard, so colours vary
        for i in range(PER_GROUP):
            chosen = [options[int(random.integers(0, 3))] for options in turns]
            ids = np.concatenate([prompt, *chosen, phrase(20, 160)])
            span = np.array([len(prompt)], np.int32), np.array([len(ids)], np.int32), np.ones(1)
            reward = float(random.random() < rate)
            content = Tokens(ids, *span)
            result.append(Trajectory(f"rollout-{group}-{i}", "made", content, f"task-{group}", reward=reward))
    return result


def seconds_of(driver: WebDriver, step: str) -> float:
    """Return the seconds for which a step keeps the page busy."""
    script = f"const start = performance.now(); {step}; return performance.now() - start"
    return float(driver.execute_script(script)) / 1000


def visit(driver: WebDriver, url: str) -> dict[str, float]:
    """Return the seconds until explorer and charts are ready, of each step after that, and the memory in MB."""
    start = time.perf_counter()
    driver.get(url)
    wait(driver, "document.documentElement.dataset.explorer")
    seconds = {"until the explorer is ready": time.perf_counter() - start}
    wait(driver, "document.documentElement.dataset.charts")
    seconds["until the charts are ready"] = time.perf_counter() - start
    for name, step in STEPS.items():
        seconds[name] = seconds_of(driver, step)
    driver.find_element("css selector", "[data-kind=trees]").click()
    wait(driver, "document.querySelector('[data-kind=trees]').ariaPressed === 'true'")
    # The trees of these rollouts are one, because all share the system prompt; a search would hide it.
    driver.execute_script("document.getElementById('search').value = ''")
    seconds["opening all rollouts as one tree"] = seconds_of(driver, STEPS["opening another group"])
    seconds["memory of the page, MB"] = driver.execute_script("return performance.memory.usedJSHeapSize") / 1e6
    return seconds


def page_of(trie: Trie, path: Path) -> None:
    """Write the page of `trie`."""
    tokenizer = load_tokenizer(str(ROOT / "sample_data" / "tokenizer"))
    subject = ReportSubject("made", trie)
    figures = measure(subject, read_shape("qwen3-8b"))
    contents = read_contents(trie, tokenizer, limit=TEXT_LIMIT)
    path.write_text(render_page(subject, figures, contents), encoding="utf-8")


def main() -> None:
    """Make the rollouts and the page, visit it, and print the times and sizes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=6250)
    groups = parser.parse_args().groups
    print(f"commit {commit()}, {platform.machine()}, {os.cpu_count()} cores")
    tokenizer = load_tokenizer(str(ROOT / "sample_data" / "tokenizer"))
    text = (ROOT / "sample_data" / "chat.jsonl").read_text()
    corpus = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
    trie = build_trie(rollouts(groups, corpus))
    print(f"{trie.num_trajectories:,} rollouts, {trie.tokens_flat:,} tokens, {trie.tokens_tree:,} in the trie")
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "report.html"
        start = time.perf_counter()
        page_of(trie, path)
        print(f"{'making the page':<34}{time.perf_counter() - start:8.1f} s")
        print(f"{'size of the page':<34}{path.stat().st_size / 1e6:8.1f} MB")
        with chromium(Path(name) / "profile") as driver:
            look(driver, width=1400)
            visits = [visit(driver, path.as_uri()) for _ in range(3)]
    for name in visits[0]:
        value = statistics.median(one[name] for one in visits)
        print(f"{name:<34}{value:8.2f}{'' if name.endswith('MB') else ' s'}")


if __name__ == "__main__":
    main()
