"""The explorer of a page on conversations, in a real browser: roles, lines, outcomes, and places of lost sharing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By

from support.browser import chromium, wait
from support.paths import SAMPLE_DATA
from support.report_page import TOKENIZER, console, items, page_url, press, visit
from treepack.ingest.options import BuildOptions
from treepack.tokenise.tokenization import load_tokenizer
from treepack.trie.directory import read_to_trie

RECTANGLES = """
    return [...document.querySelectorAll('.item:not(.stub) .frame')].map((frame) => {
        const {left, right, top, bottom} = frame.getBoundingClientRect();
        return {left, right, top, bottom};
    })
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two tasks of four rollouts, one sample for each turn: rewards of 0 and 0.5, and rewards of 1 only."""
    folder = tmp_path_factory.mktemp("shop")
    lines = (SAMPLE_DATA / "chat.jsonl").read_text().splitlines()
    (folder / "in.jsonl").write_text("\n".join(lines[:4] + lines[24:28]))
    options = BuildOptions(tokenizer=str(TOKENIZER), expand="turns")
    trie, _ = read_to_trie([folder / "in.jsonl"], options, tokenizer=load_tokenizer(str(TOKENIZER)))
    return page_url(folder / "page.html", trie)


def click(driver: WebDriver, query: str) -> None:
    driver.find_element(By.CSS_SELECTOR, query).click()


def texts(driver: WebDriver, query: str) -> list[str]:
    wait(driver, "document.getElementById('text-body').dataset.ready === 'true'")
    return [str(one.get_attribute("textContent")) for one in driver.find_elements(By.CSS_SELECTOR, query)]


def test_the_group_with_the_most_mixed_outcomes_is_open_and_groups_are_filtered(driver: WebDriver, shop: str) -> None:
    visit(driver, shop)
    assert driver.find_element(By.ID, "part-name").text == "desk-000"
    assert "4 rollouts" in driver.find_element(By.ID, "part-facts").text
    buttons = driver.find_elements(By.CSS_SELECTOR, "[data-filter]")
    assert [button.get_attribute("data-count") for button in buttons] == ["2", "1", "1"]
    for button, names in zip(buttons, (["desk-000", "desk-006"], ["desk-000"], ["desk-006"]), strict=True):
        button.click()
        assert [row.text for row in driver.find_elements(By.CSS_SELECTOR, "#rows th")] == names
    label = driver.find_element(By.CSS_SELECTOR, ".strip").get_attribute("aria-label")
    assert label == "4 rollouts: rewards 1 to 1"
    assert console(driver) == []


@pytest.mark.slow
def test_each_rollout_is_one_line_and_blocks_do_not_cover_each_other(driver: WebDriver, shop: str) -> None:
    visit(driver, shop)
    names = driver.find_elements(By.CSS_SELECTOR, "#tree .gutter")
    assert sorted(name.text.split()[-1] for name in names) == ["#0", "#1", "#2", "#3"]
    frames: list[Any] = driver.execute_script(RECTANGLES)
    assert len(frames) > 20
    for a, b in combinations(frames, 2):
        apart = a["right"] <= b["left"] + 1 or b["right"] <= a["left"] + 1
        # A block of one pixel may reach into the next one.
        thin = min(a["right"] - a["left"], b["right"] - b["left"]) < 1.6
        assert apart or thin or a["bottom"] <= b["top"] or b["bottom"] <= a["top"], (a, b)


@pytest.mark.slow
def test_roles_have_colours_and_trained_tokens_are_hatched(driver: WebDriver, shop: str) -> None:
    visit(driver, shop)
    fills = {}
    for role in ("system", "user", "assistant", "tool"):
        stripe = driver.find_element(By.CSS_SELECTOR, f".stripe.role-{role}")
        fills[role] = stripe.value_of_css_property("fill")
    assert len(set(fills.values())) == 4
    hatched = driver.execute_script(
        "return [...document.querySelectorAll('.hatch')].map((e) => e.previousElementSibling.className.baseVal)"
    )
    assert set(hatched) == {"stripe role-assistant"}
    assert texts(driver, "#legend .legend-key") == ["system", "user", "assistant", "tool", "trained"]


@pytest.mark.slow
def test_a_common_prompt_is_folded_and_unfolds_by_button_and_key(driver: WebDriver, shop: str) -> None:
    visit(driver, shop)

    def share() -> float:
        root, tree = (driver.find_element(By.CSS_SELECTOR, query).rect for query in (".item .frame", "#tree"))
        return float(root["width"] / tree["width"])

    folded = share()
    assert "in common" in driver.find_element(By.CSS_SELECTOR, ".item").text
    click(driver, "#fold")
    unfolded = share()
    assert unfolded > 1.3 * folded
    assert driver.find_element(By.ID, "fold").text == "Fold prompt"
    driver.execute_script("document.querySelector('.item[tabindex=\"0\"]').focus()")
    press(driver, "f")
    assert share() == folded


@pytest.mark.slow
def test_a_conversation_has_messages_by_role_and_tokens_have_the_template(driver: WebDriver, shop: str) -> None:
    visit(driver, shop)
    roles = texts(driver, "#text-body .message strong")
    assert roles[:4] == ["system", "user", "assistant", "tool"]
    said = texts(driver, "#text-body .said")
    assert said[0].startswith("You are the desk agent")
    assert not re.search(r"<\|im_|</?think>|</?tool_", " ".join(said[1:]))
    assert texts(driver, "#text-body .said .trained")
    click(driver, "[data-form=tokens]")
    wait(driver, "document.querySelector('#text-body pre')")
    assert "<|im_start|>system" in texts(driver, "#text-body pre")[0]
    click(driver, "[data-form=both]")
    wait(driver, "document.querySelectorAll('#text-body .column').length === 2")


@pytest.mark.slow
def test_a_long_message_is_folded_until_a_reader_opens_it(driver: WebDriver, shop: str) -> None:
    visit(driver, shop)
    wait(driver, "document.querySelector('.unfold')")
    height = "return document.querySelector('.said.folded, .said').clientHeight"
    folded = driver.execute_script(height)
    button = driver.find_element(By.CSS_SELECTOR, ".unfold")
    assert re.fullmatch(r"Show all [\d,]+ characters", button.text)
    button.click()
    assert driver.execute_script(height) > 2 * folded
    assert (button.text, button.get_attribute("aria-expanded")) == ("Show less", "true")


@pytest.mark.slow
def test_a_place_of_lost_sharing_is_marked_in_the_tree(driver: WebDriver, shop: str) -> None:
    visit(driver, shop)
    example = driver.find_element(By.CSS_SELECTOR, ".example")
    match = re.search(r"(\S+) parts from \S+ at token ([\d,]+)", example.text)
    assert match
    assert driver.find_elements(By.CSS_SELECTOR, ".lost-line") == []
    click(driver, ".go")
    wait(driver, "document.querySelector('.lost-line')")
    name, place = match.groups()
    assert driver.find_element(By.ID, "part-name").text == name.split("/")[0]
    assert f"{name} parts from the others at token {place}." in driver.find_element(By.ID, "mark-note").text
    selected = driver.find_element(By.CSS_SELECTOR, "[aria-selected=true]")
    assert f"from {place} on" in str(selected.get_attribute("aria-label"))
    assert example.find_elements(By.CSS_SELECTOR, ".pair .differs")
    click(driver, "#rows .open")
    assert driver.find_elements(By.CSS_SELECTOR, ".lost-line") == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 390])
def test_a_page_of_conversations_is_as_wide_as_a_phone(driver: WebDriver, shop: str, width: int) -> None:
    visit(driver, shop, width=width)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert len(items(driver)) > 5
    for cause in driver.find_elements(By.CSS_SELECTOR, ".cause:not([open]) > summary"):
        cause.click()
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
