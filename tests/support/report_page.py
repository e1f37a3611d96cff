"""Pages of reports for tests, and the actions of a reader in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By

from support.browser import look, wait
from support.paths import SAMPLE_DATA
from treepack.costs.model_cost import read_shape
from treepack.report.contents import read_contents
from treepack.report.figures import ReportSubject, measure
from treepack.report.page import render_page
from treepack.tokenise.tokenization import load_tokenizer
from treepack.trie.trie import Trie

TOKENIZER = SAMPLE_DATA / "tokenizer"


def page_url(path: Path, trie: Trie, *, decoded: bool = True, limit: int = 10**6) -> str:
    """Write a page of `trie` and return its URL."""
    subject = ReportSubject("made", trie)
    contents = read_contents(trie, load_tokenizer(str(TOKENIZER)) if decoded else None, limit=limit)
    path.write_text(render_page(subject, measure(subject, read_shape("qwen3-8b")), contents), encoding="utf-8")
    return path.as_uri()


def visit(driver: WebDriver, url: str, *, width: int = 1300, dark: bool = False) -> WebDriver:
    look(driver, width=width, dark=dark)
    driver.get(url)
    wait(driver, "document.documentElement.dataset.charts")
    return driver


def items(driver: WebDriver) -> list[str]:
    """Return the labels of the tree's blocks for screen readers."""
    blocks = driver.find_elements(By.CSS_SELECTOR, "[role=treeitem]")
    return [str(block.get_attribute("aria-label")) for block in blocks]


def press(driver: WebDriver, *keys: str) -> None:
    for key in keys:
        ActionChains(driver).send_keys(key).perform()


def focus(driver: WebDriver) -> str:
    element = driver.switch_to.active_element
    return str(element.get_attribute("aria-label") or element.get_attribute("outerHTML"))[:300]


def text_of(driver: WebDriver, rollout: str) -> str:
    """Wait until the text panel names this rollout and is complete, and return its text."""
    wait(driver, f"document.getElementById('text-ends').textContent.includes({rollout!r})")
    wait(driver, "document.getElementById('text-body').dataset.ready === 'true'")
    return str(driver.execute_script("return document.getElementById('text-body').textContent"))


def console(driver: WebDriver) -> list[Any]:
    """Return the messages in the console of the browser."""
    return list(driver.get_log("browser"))  # type: ignore[no-untyped-call]
