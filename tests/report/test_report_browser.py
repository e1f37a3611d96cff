"""The page of a report in a real browser: it draws, opens trees and texts, by mouse and keyboard, wide or narrow."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from support.browser import chromium, wait
from support.report_page import TOKENIZER, console, focus, items, page_url, press, text_of, visit
from support.strategies import make
from treepack.tokenise.tokenization import load_tokenizer
from treepack.trajectory import Trajectory
from treepack.trie.builders.in_memory import build_trie
from treepack.trie.trie import Trie

# Text that ends the script of a data block and runs code, if a page ever inserts text as markup.
HOSTILE = '</script><script>window.broken = 1</script><img src=x onerror="window.broken = 2">'
SYSTEM = "You repair bicycles. Every price is in euro, every answer is short, and every customer is right. "


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def talk_of(ask: str, *answers: str, name: str, group: str, reward: float) -> Trajectory:
    """Return a rollout of text: the system prompt, a question, and answers; the answers are trained."""
    tokenizer = load_tokenizer(str(TOKENIZER))
    ids, spans = tokenizer.encode(SYSTEM + ask, add_special_tokens=False), []
    for answer in answers:
        new = tokenizer.encode(answer, add_special_tokens=False)
        spans.append((len(ids), len(ids) + len(new), 1.0))
        ids += new + tokenizer.encode(" I see. ", add_special_tokens=False)
    return make(name, ids, spans=spans, group=group, reward=reward)


def trie_of_talk() -> Trie:
    ask = "My brake squeaks, what is to be done about it, and what will it cost me in the end? "
    return build_trie(
        [
            talk_of(ask, "Clean the rim first of all.", "Then sand the pads.", name="b-0", group="brake", reward=1),
            talk_of(
                ask, "Clean the rim first of all.", "Buy new pads for 12 euro.", name="b-1", group="brake", reward=0
            ),
            talk_of(ask, "Ride slower.", name="b-2", group="brake", reward=0),
            talk_of("Hello? ", HOSTILE, name=HOSTILE, group="hostile", reward=0.5),
            talk_of("Hello there! ", "Good day to you.", name="h-1", group="hostile", reward=0.5),
        ]
    )


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_url(tmp_path_factory.mktemp("talk") / "page.html", trie_of_talk())


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One group of 600 rollouts that branch at once."""
    # More branches than the 160 rows that are open at first, so a stub must hide the others.
    made = [make(f"run-{i}", [1] * 40 + [2 + i] * 30, group="all", reward=float(i % 2)) for i in range(600)]
    return page_url(tmp_path_factory.mktemp("wide") / "page.html", build_trie(made), decoded=False)


def test_all_charts_are_drawn_and_the_console_stays_empty(driver: WebDriver, talk: str) -> None:
    visit(driver, talk)
    charts = driver.find_elements(By.CSS_SELECTOR, ".chart")
    assert len(charts) == 9
    for chart in charts:
        marks = chart.find_elements(By.CSS_SELECTOR, "svg .role-mark path, svg .role-mark rect")
        boxes = [
            driver.execute_script("const b = arguments[0].getBBox(); return [b.width, b.height]", m) for m in marks
        ]
        # A mark of one pixel would be a chart without data.
        assert any(width > 1 and height > 1 for width, height in boxes), chart.get_attribute("id")
    assert console(driver) == []
    # No resource was loaded, from the network or a file.
    assert driver.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)") == []


@pytest.mark.slow
def test_a_group_opens_as_the_tree_of_its_own_rollouts(driver: WebDriver, talk: str) -> None:
    visit(driver, talk)
    names = [row.text for row in driver.find_elements(By.CSS_SELECTOR, "#rows th")]
    assert names == ["brake", "hostile"]
    facts = driver.find_element(By.ID, "part-facts").text
    tokens = sum(int(match[1]) for label in items(driver) if (match := re.match(r"(\d+) tokens?", label)))
    assert f"{tokens} shared once" in facts
    assert "3 rollouts" in items(driver)[0]
    assert "mean reward 0.333" in items(driver)[0]
    assert sum("b-" in label for label in items(driver)) == 3


@pytest.mark.slow
def test_a_click_shows_the_text_of_a_node_with_its_trained_parts_marked(driver: WebDriver, talk: str) -> None:
    visit(driver, talk)
    leaf = driver.find_element(By.CSS_SELECTOR, ".item[aria-label*='b-2']")
    leaf.find_element(By.CSS_SELECTOR, ".frame").click()
    driver.find_element(By.CSS_SELECTOR, "[data-form=tokens]").click()
    driver.find_element(By.CSS_SELECTOR, "[data-whole=false]").click()
    assert text_of(driver, "b-2") == "Ride slower. I see. "
    # " I see. " after the answer is an observation, which is not trained.
    assert [mark.text for mark in driver.find_elements(By.CSS_SELECTOR, "#text-body mark")] == ["Ride slower."]
    driver.find_element(By.CSS_SELECTOR, "[data-whole=true]").click()
    wait(driver, "document.querySelectorAll('#text-body section').length === 2")
    pieces = [pre.get_attribute("textContent") for pre in driver.find_elements(By.CSS_SELECTOR, "#text-body pre")]
    assert "".join(map(str, pieces)).startswith(SYSTEM + "My brake squeaks")
    assert "".join(map(str, pieces)).endswith("Ride slower. I see. ")


def test_text_that_looks_like_markup_is_shown_and_never_run(driver: WebDriver, talk: str) -> None:
    visit(driver, talk)
    driver.find_elements(By.CSS_SELECTOR, "#rows .open")[1].click()
    search = driver.find_element(By.ID, "search")
    search.send_keys("window.broken")
    driver.find_element(By.CSS_SELECTOR, "#hits button").click()
    assert HOSTILE in text_of(driver, "window.broken")
    assert driver.find_elements(By.CSS_SELECTOR, "#text-body script, #text-body img, #hits img, #tree img") == []
    assert driver.execute_script("return typeof window.broken") == "undefined"


@pytest.mark.slow
def test_the_keyboard_walks_the_tree_and_opens_texts(driver: WebDriver, talk: str) -> None:
    visit(driver, talk)
    # The control before the tree in the order of the tabulator is disabled until a reader zooms.
    driver.execute_script(
        "document.getElementById('zoom-out').disabled = false; document.getElementById('zoom-out').focus()"
    )
    press(driver, Keys.TAB)
    assert "from 0 on" in focus(driver)
    press(driver, Keys.ARROW_RIGHT)
    first = focus(driver)
    assert "2 rollouts" in first
    press(driver, Keys.ARROW_DOWN)
    assert "b-2" in focus(driver)
    press(driver, Keys.ENTER)
    assert "Ride slower." in text_of(driver, "b-2")
    assert "b-2" in focus(driver)
    press(driver, Keys.ARROW_UP, Keys.ARROW_RIGHT)
    assert re.search(r"b-[01]", focus(driver))
    press(driver, Keys.ARROW_LEFT)
    assert focus(driver) == first
    press(driver, "z")  # the node of the first answer, and the two rollouts below it
    assert len(items(driver)) == 3
    press(driver, Keys.ESCAPE)
    assert len(items(driver)) == 5
    assert focus(driver) == first
    press(driver, Keys.HOME)
    assert "from 0 on" in focus(driver)


@pytest.mark.slow
def test_every_control_can_be_reached_with_the_tabulator_and_has_a_name(driver: WebDriver, talk: str) -> None:
    visit(driver, talk)
    nameless = driver.execute_script(
        "return [...document.querySelectorAll('button, select, input, a, [role=region], [role=tree]')].filter((e) =>"
        " !e.textContent.trim() && !e.ariaLabel && !e.labels?.length && !e.getAttribute('aria-labelledby'))"
        ".map((e) => e.outerHTML)"
    )
    assert nameless == []
    wanted = driver.execute_script(
        "return [...document.querySelectorAll('button, select, input, summary, a, [tabindex=\"0\"]')]"
        ".filter((e) => !e.disabled && e.checkVisibility() && e.tabIndex >= 0).length"
    )
    seen = set()
    driver.execute_script("document.activeElement.blur()")
    for _ in range(wanted + 3):
        press(driver, Keys.TAB)
        seen.add(driver.execute_script("return document.activeElement.outerHTML.slice(0, 200)"))
    # Elements with equal first 200 characters count once, so a few are missing from the set.
    assert len(seen) > 0.8 * wanted > 20


@pytest.mark.slow
def test_a_wide_tree_is_drawn_in_part_and_opened_on_demand(driver: WebDriver, wide: str) -> None:
    visit(driver, wide)
    labels = items(driver)
    assert 20 < len(labels) < 400
    # The labels are the root, some branches and one stub for the others.
    assert labels[-1] == f"{600 - (len(labels) - 2)} more branches, Enter opens them"
    stub = driver.find_element(By.CSS_SELECTOR, ".stub")
    driver.execute_script("arguments[0].focus()", stub)
    press(driver, Keys.ENTER)
    assert len(items(driver)) > len(labels) + 50
    search = driver.find_element(By.ID, "search")
    search.send_keys("run-599")
    driver.find_element(By.CSS_SELECTOR, "#hits button").click()
    assert text_of(driver, "run-599").startswith("601 601 ")
    assert "run-599" in focus(driver)


@pytest.mark.slow
def test_a_tree_of_thousands_of_turns_is_opened_at_any_of_them(driver: WebDriver, tmp_path: Path) -> None:
    # Each rollout continues the one before it, so the tree is a chain 4,000 nodes deep: recursion would overflow.
    ids = [1, *(2 + i % 700 for i in range(4000))]
    made = [make(f"turn-{i}", ids[: i + 2], spans=[(i + 1, i + 2, 1.0)], group="long") for i in range(4000)]
    visit(driver, page_url(tmp_path / "page.html", build_trie(made), decoded=False))
    driver.find_element(By.ID, "search").send_keys("turn-3210", Keys.ENTER)
    assert text_of(driver, "turn-3210").strip() == str(2 + 3210 % 700)
    assert "turn-3210" in driver.find_element(By.ID, "text-ends").text
    assert "from 3,211 on" in focus(driver)
    assert console(driver) == []


@pytest.mark.slow
def test_the_end_of_a_part_says_what_was_edited_and_who_made_it(driver: WebDriver, tmp_path: Path) -> None:
    facts: list[tuple[list[int], dict[str, Any]]] = [
        ([1, 2, 3, 4], {}),
        ([1, 2, 7], {}),
        ([1, 9], {"agent": "explorer"}),
    ]
    made = [
        replace(make(f"part-{i}", ids, group="S"), rollout_id="S", rollout_part=i, source="made", metadata=metadata)
        for i, (ids, metadata) in enumerate(facts)
    ]
    visit(driver, page_url(tmp_path / "page.html", build_trie(made), decoded=False))
    for name, note in (("part-1", "edited after 2 of 4 tokens"), ("part-2", "sub-agent explorer")):
        search = driver.find_element(By.ID, "search")
        search.clear()
        search.send_keys(name, Keys.ENTER)
        text_of(driver, name)
        assert driver.find_element(By.ID, "text-ends").text == f"Ends here: {name}: {note}"
    assert console(driver) == []


@pytest.mark.slow
def test_the_list_is_sorted_by_any_column_and_searched(driver: WebDriver, talk: str) -> None:
    visit(driver, talk)

    def names() -> list[str]:
        return [row.text for row in driver.find_elements(By.CSS_SELECTOR, "#rows th")]

    # The first click on a column of numbers sorts from the highest down, the second from the lowest up.
    for column, down in (("reward", ["hostile", "brake"]), ("overlap", ["brake", "hostile"])):
        head = driver.find_element(By.CSS_SELECTOR, f"[data-sort={column}]")
        head.click()
        assert names() == down
        head.click()
        assert names() == down[::-1]
        assert driver.find_element(By.CSS_SELECTOR, "[aria-sort=ascending]").text.lower() == column
    driver.find_element(By.ID, "search").send_keys("BRA")
    assert names() == ["brake"]
    driver.find_element(By.CSS_SELECTOR, "[data-kind=trees]").click()
    wait(driver, "document.querySelector('[data-kind=trees]').ariaPressed === 'true'")
    driver.find_element(By.ID, "search").clear()
    driver.find_element(By.ID, "search").send_keys("b-1")
    assert names() == ["tree 1"]


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 390, 800, 1800])
def test_nothing_is_wider_than_the_window(driver: WebDriver, talk: str, width: int) -> None:
    visit(driver, talk, width=width)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    right = driver.execute_script(
        "return Math.max(...[...document.querySelectorAll('svg.marks, #tree, h1, .card')]"
        ".map((e) => e.getBoundingClientRect().right))"
    )
    assert 0 < right <= width + 1


@pytest.mark.slow
def test_a_phone_shows_the_numbers_before_the_sentences(driver: WebDriver, talk: str) -> None:
    visit(driver, talk, width=390)
    order = ["#headline", ".totals", ".tiles", ".sentences", "#charts"]
    tops = [driver.find_element(By.CSS_SELECTOR, each).rect["y"] for each in order]
    assert tops == sorted(tops)


@pytest.mark.slow
def test_a_chart_that_is_not_drawn_yet_has_a_placeholder(driver: WebDriver, talk: str) -> None:
    visit(driver, talk)
    content = "getComputedStyle(document.querySelector('.chart'), '::before').content"
    assert driver.execute_script(f"return {content}") == "none"
    driver.execute_script("delete document.querySelector('.chart').dataset.drawn")
    assert driver.execute_script(f"return {content}") == '"The chart is being drawn."'


def luminance(colour: str) -> float:
    """Return the relative luminance of an rgb() colour, as WCAG 2 defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_text_has_contrast_in_the_colours_of_the_system_and_of_the_button(
    driver: WebDriver, talk: str, dark: bool
) -> None:
    visit(driver, talk, dark=dark)
    backgrounds = []
    for _ in range(2):
        style: Any = driver.execute_script(
            "const of = (query, key) => getComputedStyle(document.querySelector(query))[key];"
            "return {page: of('body', 'backgroundColor'), card: of('.card', 'backgroundColor'),"
            " text: of('body', 'color'), muted: of('figcaption', 'color'), accent: of('.gain', 'color')}"
        )
        shades = {name: luminance(colour) for name, colour in style.items()}
        backgrounds.append(shades["page"])
        for ground, ink in itertools.product(("page", "card"), ("text", "muted", "accent")):
            low, high = sorted([shades[ground], shades[ink]])
            assert (high + 0.05) / (low + 0.05) >= 4.5, (ground, ink, style)  # level AA of WCAG 2 for text
        driver.find_element(By.ID, "theme").click()
    assert (backgrounds[0] < 0.1) == dark
    assert (backgrounds[1] < 0.1) != dark


@pytest.mark.slow
def test_left_out_tokens_are_counted_in_the_hint_and_in_the_text(driver: WebDriver, tmp_path: Path) -> None:
    visit(driver, page_url(tmp_path / "page.html", trie_of_talk(), limit=40))
    hint = driver.find_element(By.CSS_SELECTOR, ".hint").text
    assert re.search(r"the first \d+ tokens of each node: \d+ are left out \(--text-limit\)", hint)
    wait(driver, "document.querySelector('#text-body .gap')")
    assert re.search(r"\[\d+ tokens left out\]", driver.find_element(By.CSS_SELECTOR, "#text-body .gap").text)
