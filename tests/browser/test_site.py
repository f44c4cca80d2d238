"""The built site in a browser: search, formulas, phone screens, and no external requests; `nox -s docs` builds the site."""

import functools
import http.server
import threading
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import sync_playwright

from docs.scripts.links import SITE

PHONE, DESK = 390, 1280
OPTIONS = ["--no-sandbox", "--disable-quic", "--disable-background-networking"]
SEARCHES = {
    "learning rate": "reference/configuration/#learning-rate-and-optimizer",
    "learner.lr": "reference/configuration/#learning-rate-and-optimizer",
    "batch size": "reference/configuration/#batch-size-and-group-size",
    "group size": "reference/configuration/#batch-size-and-group-size",
    "gradient clipping": "reference/configuration/#gradient-clipping-and-skipped-updates",
    "temperature": "reference/configuration/#temperature-and-response-length",
    "KL": "reference/configuration/#kl-penalty",
    "entropy": "reference/configuration/#entropy-bonus",
    "lora": "reference/configuration/#lora",
    "deepspeed": "reference/configuration/#processes-deepspeed-fsdp2-and-offload",
    "clip fraction": "reference/metrics/#clip-fraction",
    "LRE": "explanation/length-fairness/#what-lre-is",
    "resume": "how-to/stop-and-resume/#resume",
    "custom reward": "how-to/own-reward/",
    "own data": "how-to/own-data/",
    "write a rule": "how-to/write-a-rule/",
    "vllm": "how-to/vllm/",
    "mlflow": "how-to/keep-mlflow-up/",
}
"""What a reader types, and the page that should be one of the first two results."""

pytestmark = pytest.mark.skipif(not (SITE / "index.html").exists(), reason="the site is not built; nox -s docs does it")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    page = browser.new_page(viewport={"width": DESK, "height": 900})
    yield page
    page.close()


@pytest.fixture
def search(page, address):
    """Return a function that types into the site's own search, and returns the paths of the results."""
    page.goto(address)
    page.wait_for_load_state("networkidle")
    page.keyboard.press("Control+k")
    field = page.get_by_role("combobox", name="Search")

    def results(words):
        field.fill("")
        page.get_by_role("option").first.wait_for(state="detached")
        field.fill(words)
        marked = page.locator("[role=option] mark").first  # results for these words, not for the previous ones
        marked.wait_for()
        links = [urlsplit(option.get_attribute("href")) for option in page.get_by_role("option").all()]
        return [link.path.lstrip("/") + (f"#{link.fragment}" if link.fragment else "") for link in links]

    return results


def test_typical_searches_find_their_page_in_the_first_two_results(search):
    found = {words: search(words)[:2] for words in SEARCHES}
    assert {words: first for words, first in found.items() if SEARCHES[words] not in first} == {}


def test_learning_rate_finds_the_setting_first(search):
    assert search("learning rate")[0] == SEARCHES["learning rate"]


def test_pages_fit_a_phone_screen_and_load_no_external_resources(browser, address):
    page = browser.new_page(viewport={"width": PHONE, "height": 844})
    requested = []
    page.on("request", lambda request: requested.append(request.url))
    wide = {}
    for file in sorted(SITE.rglob("*.html")):
        name = file.relative_to(SITE).as_posix()
        page.goto(address + name.removesuffix("index.html"), wait_until="load")
        width = page.evaluate("document.scrollingElement.scrollWidth - innerWidth")
        if width > 0:
            wide[name] = width
    page.close()
    assert wide == {}  # pixels beyond the screen
    assert {url for url in requested if not url.startswith((address, "data:", "blob:"))} == set()


def test_formulas_have_the_font_with_mathematical_tables(page, address):
    page.goto(f"{address}rules/fspo/")
    page.locator("math[display=block]").first.wait_for()
    page.evaluate("document.fonts.ready")
    assert page.evaluate(
        """[...document.fonts].some(font => font.family.includes("STIX Two Math") && font.status === "loaded")"""
    )
    brace = page.locator("math[display=block] mo", has_text="{").first.bounding_box()
    assert brace["height"] > 40  # it stretches over both cases
