"""A headless Chromium, driven by selenium, for tests of pages."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.support.ui import WebDriverWait

FLAGS = """
    --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic
    --no-first-run --disable-background-networking --disable-component-update --disable-sync
""".split()
PATIENCE = 60  # seconds, for machines that are busy


@contextmanager
def chromium(profile: Path) -> Iterator[WebDriver]:
    """A browser with an empty `profile`; if none is installed, the test is skipped with a warning."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        missing = "Chromium or its driver is not installed, so pages are not tested: apt-get install chromium-driver"
        warnings.warn(missing, stacklevel=1)
        pytest.skip(missing)
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    window = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield window
    finally:
        window.quit()


def look(driver: WebDriver, *, width: int, height: int = 900, dark: bool = False) -> None:
    """Set the size of the window and the colour scheme of the system, and let nothing move by itself."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    wanted = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
    features = [{"name": name, "value": value} for name, value in wanted.items()]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def wait(driver: WebDriver, script: str) -> Any:
    """The value of a JavaScript expression, once it is true."""
    return WebDriverWait(driver, PATIENCE).until(lambda one: one.execute_script(f"return {script}"))
