"""The page of a run in a real browser: it follows the run, shows hostile rollouts as text, and stays quick."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By

from support.browser import chromium, look, wait
from support.report_page import console, text_of
from support.run_folder import TOKENIZER, packed_text, run_folder, step_record, write_lines
from support.strategies import make
from treepack.errors import TreepackError
from treepack.files.lock import lock
from treepack.report.live import server as run_server
from treepack.report.live.run_state import RunFolder
from treepack.report.live.server import RunServer
from treepack.report.live.start_log import StartLog
from treepack.report.live.watch import RunWatch
from treepack.report.live.write_run import write_run_report
from treepack.tokenise.tokenization import load_tokenizer
from treepack.trajectory import Trajectory

HOSTILE = '</script><script>window.broken = 1</script><img src=x onerror="window.broken = 2">\u202etxt'


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_server, "POLL_SECONDS", 0.05)


@contextmanager
def served(folder: Path, earlier: str = "") -> Iterator[RunServer]:
    """A server of the run in `folder`, in this process."""
    server = RunServer(RunWatch(RunFolder(folder), text_limit=100_000), earlier=earlier)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(20)


def rollout(i: int) -> Trajectory:
    encode = load_tokenizer(str(TOKENIZER)).encode
    prompt, answer = encode(f"Question {i // 2}: ", add_special_tokens=False), encode(HOSTILE, add_special_tokens=False)
    ids = prompt + encode(f"answer {i} ", add_special_tokens=False) + answer
    return make(f"r{i} {HOSTILE}", ids, spans=[(len(prompt), len(ids), 1.0)], group=f"q{i // 2}", reward=float(i % 2))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "packed"
    return packed_text(path, [rollout(i) for i in range(6)], capacity=160)


def records_of(folder: Path, steps: range, **more: Any) -> list[dict[str, Any]]:
    """Return records of steps with the rows and tokens that the steps of this run have."""
    rows = RunWatch(RunFolder(folder)).rows
    assert rows is not None
    sizes = {step: rows.of_step(step) for step in steps}
    return [
        step_record(step, num_rows=len(own), tokens=int(rows.num_tokens[own].sum()), reward=0.5, kl=0.01, **more)
        for step, own in sizes.items()
    ]


def num_points(driver: WebDriver) -> int:
    return int(driver.execute_script("return document.querySelectorAll('#chart-curve-0 .mark-symbol path').length"))


def state(driver: WebDriver) -> str:
    return driver.find_element(By.ID, "state").text


@pytest.mark.slow
def test_the_page_follows_a_run_that_dies_and_resumes(driver: WebDriver, packed: Path, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", packed=packed, options={"epochs": 20})
    look(driver, width=1300)
    with served(folder) as server:
        with lock(folder):
            driver.get(server.url)
            wait(driver, "document.getElementById('state').textContent === 'running, before the first step'")
            write_lines(folder, records_of(folder, range(1, 4)))
            wait(driver, "document.getElementById('state').textContent === 'running, step 3 done'")
            wait(driver, "document.querySelectorAll('#chart-curve-0 .mark-symbol path').length === 3")
            titles = [title.text for title in driver.find_elements(By.CSS_SELECTOR, "#charts h3")]
            assert titles[:3] == ["Loss", "Reward", "KL from the reference"]
            write_lines(folder, records_of(folder, range(4, 6)), mode="a")
            wait(driver, "document.querySelectorAll('#chart-curve-0 .mark-symbol path').length === 5")
            assert re.fullmatch(r"step 5 of \d+, .* of training, .* left", driver.find_element(By.ID, "progress").text)
        (tmp_path / ".run.lock").write_text("process 7 on a machine")
        wait(driver, "document.getElementById('dot').className === 'dot died'")
        assert "process 7 on a machine does not run any more; continue with --resume" in state(driver)
        (folder / "new").write_text("".join(json.dumps(each) + "\n" for each in records_of(folder, range(1, 3))))
        (folder / "new").replace(folder / "metrics.jsonl")
        with lock(folder):
            wait(driver, "document.getElementById('notes').textContent.includes('resumed after step 2')")
            wait(driver, "document.querySelectorAll('#chart-curve-0 .mark-symbol path').length === 2")
            assert state(driver) == "running, step 2 done"
        (folder / "train.json").write_text(json.dumps({"num_steps": 2}))
        wait(driver, "document.getElementById('dot').className === 'dot finished'")
    assert console(driver) == []


@pytest.mark.slow
def test_a_page_whose_server_ended_follows_the_run_that_resumes(
    driver: WebDriver, packed: Path, tmp_path: Path
) -> None:
    folder = run_folder(tmp_path / "run", packed=packed, options={"epochs": 20})
    write_lines(folder, records_of(folder, range(1, 4)))
    with served(folder) as server:
        driver.get(server.url)
        wait(driver, "document.getElementById('state').textContent === 'stopped after step 3; continue with --resume'")
    with lock(folder), served(folder, server.url) as again:
        assert again.url == server.url
        wait(driver, "document.getElementById('state').textContent === 'running, step 3 done'")
    console(driver)  # the browser names its attempts while no server was there


@pytest.mark.slow
@pytest.mark.parametrize("width", [1300, 400])
def test_the_page_shows_a_command_before_its_first_step_and_why_it_failed(
    driver: WebDriver, packed: Path, tmp_path: Path, width: int
) -> None:
    folder, say = tmp_path / "run", logging.getLogger("treepack").info
    look(driver, width=width)
    with lock(folder), StartLog(folder) as log:
        say("importing torch")
        with served(folder) as server:
            driver.get(server.url)
            wait(driver, "document.getElementById('state').textContent === 'starting: importing torch'")
            elapsed = driver.find_element(By.ID, "elapsed").text
            assert re.fullmatch(r", \d+ s since the command started", elapsed)
            run_folder(folder, packed=packed, options={"epochs": 20})
            say(f"step 1 of 60 {HOSTILE}")
            wait(driver, "document.querySelectorAll('#start li').length === 2")
            assert driver.find_element(By.ID, "progress").text == "step 1 of 60"
            log.end()
            slow = {"seconds": 0.25, "tokens": 100, "rows": [2, 0]}
            write_lines(folder, records_of(folder, range(1, 4), slowest_pass=slow))
            wait(driver, "document.querySelectorAll('#passes tr').length === 2")
            assert driver.find_element(By.ID, "show-command").text == f"treepack show {packed} --row 2"
            assert not driver.find_element(By.ID, "start").is_displayed()
            wait(driver, "document.documentElement.dataset.explorer === 'ready'")
            scrolls = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
            assert not driver.execute_script(f"return {scrolls}")
            with StartLog(folder) as again:
                again.fail(TreepackError(f"out of memory {HOSTILE}"))
                wait(driver, "document.getElementById('dot').className === 'dot failed'")
                assert "failed before step 4: out of memory </script>" in state(driver)
    assert not driver.execute_script("return window.broken")
    assert console(driver) == []


def test_hostile_rollouts_are_text_in_the_explorer_of_the_newest_steps(
    driver: WebDriver, packed: Path, tmp_path: Path
) -> None:
    folder = run_folder(tmp_path / "run", packed=packed, options={"epochs": 20})
    write_lines(folder, records_of(folder, range(1, 3)))
    look(driver, width=1300)
    with served(folder) as server:
        driver.get(server.url)
        wait(driver, "document.documentElement.dataset.explorer")
        assert re.match(r"Rollouts of steps 1 to 2, in 2 rows of [\d,]+ tokens", about(driver))
        driver.find_element(By.ID, "search").send_keys("window.broken")
        driver.find_element(By.CSS_SELECTOR, "#hits button").click()
        assert "<script>window.broken = 1" in text_of(driver, "window.broken")
        write_lines(folder, records_of(folder, range(3, 5)), mode="a")
        wait(driver, "!document.getElementById('newest').hidden")
        driver.find_element(By.ID, "newest").click()
        wait(driver, "document.getElementById('rollouts-about').textContent.includes('steps 1 to 4')")
        wait(driver, "document.querySelectorAll('#rows th').length > 3")
        driver.execute_script("document.querySelector('#slowest button').click()")
        wait(driver, "document.getElementById('search').value.startsWith('(step ')")
        assert driver.execute_script("return typeof window.broken") == "undefined"
        assert driver.find_elements(By.CSS_SELECTOR, "#explorer img, #tree img") == []
        # The content policy would stop an inline script even if one were inserted.
        driver.execute_script(
            "const s = document.createElement('script'); s.textContent = 'window.broken = 3'; document.body.append(s)"
        )
        assert driver.execute_script("return typeof window.broken") == "undefined"
    assert all("Content Security Policy" in each["message"] for each in console(driver))


def about(driver: WebDriver) -> str:
    return driver.find_element(By.ID, "rollouts-about").text


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(390, True), (1300, False)])
def test_the_file_of_a_run_needs_nothing_else(
    driver: WebDriver, packed: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    folder = run_folder(tmp_path / "run", packed=packed)
    write_lines(folder, records_of(folder, range(1, 4)))
    write_run_report(folder, page=tmp_path / "run.html")
    look(driver, width=width, dark=dark)
    driver.get((tmp_path / "run.html").as_uri())
    wait(driver, "document.documentElement.dataset.charts && document.documentElement.dataset.explorer")
    assert num_points(driver) == 3
    assert state(driver) == "ended after step 3, the last one; if the model is missing, continue with --resume"
    assert about(driver).startswith("Rollouts of steps 1 to 3, in 3 rows of")
    assert driver.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)") == []
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    drawn = driver.execute_script(
        "return [...document.querySelectorAll('.chart')].every((e) => e.querySelector('svg').getBBox().width > 100)"
    )
    assert drawn
    cut_off = driver.execute_script(
        "const left = (e) => e.getBoundingClientRect().left;"
        "return [...document.querySelectorAll('.chart text')].filter((e) => left(e) < left(e.closest('svg')) - 0.5)"
        ".map((e) => e.textContent)"
    )
    assert cut_off == []
    plan = driver.find_element(By.ID, "plan-rows").get_attribute("textContent")
    assert "chosen: pass tokens4096" in str(plan)
    # On a phone the numbers are on the first screen.
    tiles = driver.find_element(By.ID, "tiles").rect
    assert tiles["y"] + 100 < 900
    assert console(driver) == []
