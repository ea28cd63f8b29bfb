"""The page in a real browser: Debian's Chromium, driven by selenium. Skipped where that is not installed.

With ATOLL_PICTURES=1 the pictures of docs/seeing.md are made anew, from a real run of this machine.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from coordinators import PATIENCE_S, Running, Talker, rules, running, talking

from atoll.elastic.messages import Go, Have, Reached, Ready

selenium = pytest.importorskip("selenium", reason="selenium is not installed: pip install 'atoll[dev]'")

from selenium import webdriver  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402

from .test_link import settle, wait_until  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None, reason="no Chromium here: apt-get install chromium chromium-driver"
    ),
]
PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
LAPTOP, PHONE = (1280, 800), (390, 844)


class Browser:
    """One browser with a fresh profile."""

    def __init__(self, profile: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        options.accept_insecure_certs = True
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        for word in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", f"user-data-dir={profile}"):
            options.add_argument(f"--{word}")
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))

    def see(self, size: tuple[int, int], *, dark: bool = False) -> None:
        """At this many pixels, in light or dark."""
        about = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size[0] < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", about)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def ask(self, script: str) -> Any:
        return self.driver.execute_script(f"return {script}")

    @property
    def text(self) -> str:
        return str(self.ask("document.body.innerText"))

    def wait(self, true: Callable[[str], bool]) -> str:
        """The text of the page, once it is so."""
        deadline = time.monotonic() + 3 * PATIENCE_S
        while not true(text := self.text):
            assert time.monotonic() < deadline, text
            time.sleep(0.05)
        return text

    def enter(self, token: str) -> None:
        self.wait(lambda text: "A token for this run" in text)
        self.driver.find_element(By.ID, "token").send_keys(token)
        self.driver.find_element(By.CSS_SELECTOR, "form button").click()

    def complaints(self) -> list[str]:
        """What the browser itself complained of; that a request was refused or failed is no complaint of the page's."""
        lines = [entry["message"] for entry in self.driver.get_log("browser")]
        return [line for line in lines if "Failed to load resource" not in line]

    def picture(self, path: Path) -> None:
        """Of the whole page."""
        height = self.ask("document.documentElement.scrollHeight")
        width = self.ask("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        about = {"format": "png", "captureBeyondViewport": True, "clip": clip}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.driver.execute_cdp_cmd("Page.captureScreenshot", about)["data"]))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.driver.quit()


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test begins without cookies, and the browser has nothing to complain of."""
    browser: Browser = request.getfixturevalue("browser")
    browser.driver.get("about:blank")
    browser.driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
    browser.see(LAPTOP)
    browser.complaints()
    yield
    assert browser.complaints() == []


def live(folder: Path, **about: Any) -> AbstractContextManager[Running]:
    """A coordinator whose clock goes."""
    return running(folder, rules=rules(**about), clock=time.time)


def address(run: Running) -> str:
    return f"https://127.0.0.1:{run.coordinator.address.port}/"


def make_rounds(islands: list[Talker], numbers: range) -> None:
    """Rounds of islands that say what real ones say."""
    for number in numbers:
        before, after = f"anchor-{number - 1}", f"anchor-{number}"
        for island in islands:
            island.link.send(Ready(number, before, 640.0, 1.0, True, 10, inner_s=0.02, loss=5.0 / number))
        for island in islands:
            go = island.hear(Go)
            sent = {"payload_bytes": 40_000, "wire_s": 0.01, "meet_s": 0.002, "send_s": 0.004, "outer_s": 0.001}
            island.link.send(
                Reached(number, go.attempt, after, norms=(1.0,) * len(go.participants), step_bytes=80_000, **sent)
            )
        wait_until(lambda: all(island.link.events.qsize() for island in islands))
        for island in islands:
            island.said = replace(island.said, round=number, digest=after)
            island.link.send(Have(number, after))


@contextmanager
def two_islands(run: Running) -> Iterator[list[Talker]]:
    islands = [Talker(run.token(), number, name=name) for number, name in enumerate(["reef", "lagoon <b>"])]
    with talking(*islands):
        settle(islands)
        yield islands


# --- the page ---


def test_the_page_shows_the_run_and_loads_nothing_from_elsewhere(browser: Browser, tmp_path: Path) -> None:
    with live(tmp_path / "shallow", num_rounds=20) as run, two_islands(run) as islands:
        make_rounds(islands, range(1, 7))
        browser.driver.get(address(run))
        browser.enter(run.token_line("watch"))
        text = browser.wait(lambda text: "6 / 20" in text and "Bytes sent" in text)
        for shown in ("shallow", "reef", "lagoon <b>", "20x less than data parallel", "step 60 of 200", "joined"):
            assert shown in text
        browser.wait(lambda text: browser.ask("document.querySelectorAll('canvas').length") == 4)
        assert browser.ask("document.querySelectorAll('#timeline .box.train').length") >= 8
        loaded = browser.ask("performance.getEntriesByType('resource').map(one => one.name)")
        assert {url for url in loaded if not url.startswith(address(run))} == set()
        assert browser.ask("document.cookie") == ""
        make_rounds(islands, range(7, 8))
        browser.wait(lambda text: "7 / 20" in text)  # of itself


def test_nothing_sticks_out_at_any_width(browser: Browser, tmp_path: Path) -> None:
    with live(tmp_path, num_rounds=20) as run, two_islands(run) as islands:
        make_rounds(islands, range(1, 4))
        browser.driver.get(address(run))
        browser.enter(run.token_line("watch"))
        browser.wait(lambda text: "3 / 20" in text and "Last rounds" in text)
        for size, dark in itertools.product([LAPTOP, PHONE], [False, True]):
            browser.see(size, dark=dark)
            browser.wait(lambda text, width=size[0]: browser.ask("document.documentElement.scrollWidth") <= width)
            back = browser.ask("getComputedStyle(document.body).backgroundColor")
            brightness = sum(int(part) for part in back.strip("rgb()").split(","))
            assert (brightness < 300) == dark


def test_a_wrong_token_is_told_and_the_right_one_opens(browser: Browser, tmp_path: Path) -> None:
    with live(tmp_path) as run:
        browser.driver.get(address(run))
        browser.enter(run.token_line("join"))
        browser.wait(lambda text: "is for join" in text)
        browser.driver.find_element(By.ID, "token").clear()
        browser.enter(run.token_line("operator"))
        browser.wait(lambda text: "None has come yet" in text)


def test_the_page_outlasts_the_coordinator_and_says_so(browser: Browser, tmp_path: Path) -> None:
    with ExitStack() as stack:
        with live(tmp_path, num_rounds=20) as run:
            islands = stack.enter_context(two_islands(run))
            make_rounds(islands, range(1, 3))
            browser.driver.get(address(run))
            browser.enter(run.token_line("watch"))
            browser.wait(lambda text: "2 / 20" in text)
        browser.wait(lambda text: "reconnecting" in text and "2 / 20" in text)
        with live(tmp_path, num_rounds=20) as run:
            settle(islands)
            make_rounds(islands, range(3, 4))
            browser.wait(lambda text: "3 / 20" in text and "reconnecting" not in text)


def test_an_island_that_dies_is_shown_as_lost(browser: Browser, tmp_path: Path) -> None:
    with live(tmp_path, num_rounds=20, lost_after_s=0.5) as run, two_islands(run) as islands:
        make_rounds(islands, range(1, 3))
        browser.driver.get(address(run))
        browser.enter(run.token_line("watch"))
        browser.wait(lambda text: "2 / 20" in text)
        islands[1].link.close()
        browser.wait(lambda text: browser.ask("document.querySelectorAll('tr.gone .dot.lost').length") == 1)


def test_a_finished_run_is_shown_to_its_end(browser: Browser, tmp_path: Path) -> None:
    with ExitStack() as stack:
        with live(tmp_path, num_rounds=3) as run:
            islands = stack.enter_context(two_islands(run))
            make_rounds(islands, range(1, 4))
            browser.driver.get(address(run))
            browser.enter(run.token_line("watch"))
            browser.wait(lambda text: "finished" in text and "3 / 3" in text)
        browser.wait(lambda text: "its coordinator has ended" in text and "3 / 3" in text)


def test_the_link_of_status_page_opens_it_and_leaves_no_trace(browser: Browser, tmp_path: Path) -> None:
    with live(tmp_path) as run, page_link(tmp_path) as link:
        browser.driver.get(link)
        browser.wait(lambda text: "None has come yet" in text)
        assert browser.driver.current_url == link.partition("#")[0]
        assert browser.ask("document.cookie") == ""
        browser.driver.refresh()
        browser.wait(lambda text: "None has come yet" in text)
        assert run.status()["round"] == 0


@contextmanager
def page_link(folder: Path) -> Iterator[str]:
    """`atoll status RUN --page`, once it has printed its link."""
    command = [sys.executable, "-m", "atoll", "status", str(folder), "--page"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 0


# --- the pictures of the docs ---


@pytest.mark.skipif("ATOLL_PICTURES" not in os.environ, reason="makes the pictures of the docs: ATOLL_PICTURES=1")
def test_make_the_pictures(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "reef"
    settings = "--replicas 3 --elastic --device cpu --threads 1 --inner-steps 20 --max-steps 400 --eval-steps 40"
    words = f"train quickstart {settings} --compressor int4 --output-dir {folder}".split()
    with subprocess.Popen([sys.executable, "-m", "atoll", *words], stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        reader = threading.Thread(target=training.stdout.read)  # so that it never waits to be read
        reader.start()
        try:
            take_pictures(browser, folder)
        finally:
            training.terminate()
            reader.join()


def take_pictures(browser: Browser, folder: Path) -> None:
    status = wait_for_status(folder, lambda known: known["round"] >= 5)
    with page_link(folder) as link:
        browser.driver.get(link)
        browser.wait(lambda text: "Last rounds" in text)
        snap(browser, "page-running")
        joined = [event for event in events_of(folder) if event["event"] == "member" and event["what"] == "joined"]
        os.kill(next(event["pid"] for event in joined if event["replica"] == 2), signal.SIGKILL)
        browser.wait(lambda text: "2 lost" in text or "lost" in text.split("Events")[0])
        wait_for_status(folder, lambda known: known["round"] >= status["round"] + 4)
        snap(browser, "page-dead-island")
        browser.wait(lambda text: "finished" in text and "at step 400" in text)
        snap(browser, "page-finished")


def snap(browser: Browser, name: str) -> None:
    for size, suffix, dark in ((LAPTOP, "", False), (PHONE, "-phone", False), (LAPTOP, "-dark", True)):
        if dark and name != "page-running":
            continue
        browser.see(size, dark=dark)
        time.sleep(0.5)  # charts follow their width
        browser.picture(PICTURES / f"{name}{suffix}.png")
    browser.see(LAPTOP)


def events_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def wait_for_status(folder: Path, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    from atoll.cli.elastic import _operator
    from atoll.elastic.link import fetch_status
    from atoll.errors import AtollError

    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        try:
            known = fetch_status(_operator(folder))
            if true(known):
                return known
        except AtollError:
            pass
        time.sleep(0.2)
    raise AssertionError("it never came to that")
