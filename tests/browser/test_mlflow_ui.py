"""A sweep as users see it in MLflow's own pages, in a real browser.

With ``RLZOO_SCREENSHOTS`` set to a folder, screenshots are saved there. With ``RLZOO_SWEEP_STORE`` set to a tracking URI, the
sweep of that store is tested instead of a small one created here.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from mlflow import MlflowClient
from playwright.sync_api import expect, sync_playwright

from rlzoo.journal.tracking.views import NAME, SECTIONS, view_path
from rlzoo.measure.colours import rule_colour

FLAGS = ["--no-sandbox", "--disable-quic", "--disable-background-networking"]
SLOW = 90_000  # milliseconds; the pages are large and the machine may be busy
STEPS = 100  # enough time for a sample of the machine
CURVES = ("reward/mean", "clip/fraction", "fairness/lre_max")
GLANCE = ("accuracy", "clip/fraction")  # the first of many charts; the page only draws the visible ones


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The tracking URI of a store with one sweep: two policies, two seeds."""
    if given := os.environ.get("RLZOO_SWEEP_STORE"):
        return given
    folder = tmp_path_factory.mktemp("browser")
    uri = f"sqlite:///{folder}/mlflow.db"
    settings = ["rollout.num_prompts=8", "rollout.group_size=4", "task.num_operands_max=4", "eval.num_problems=20"]
    command = [
        sys.executable,
        "-m",
        "rlzoo",
        "sweep",
        "--clip",
        "fspo,gspo",
        "--seeds",
        "2",
        "--steps",
        str(STEPS),
        "--jobs",
        "2",
    ]
    command += ["--output", "race", *(word for setting in settings for word in ("--set", setting))]
    variables = {"MLFLOW_TRACKING_URI": uri, "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "0.2"}
    subprocess.run(command, cwd=folder, env=os.environ | variables, check=True)
    return uri


@pytest.fixture(scope="module")
def address(store):
    """The address of `rlzoo ui` for that store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "rlzoo", "ui", "--port", str(port)]
    server = subprocess.Popen(command, env=os.environ | {"MLFLOW_TRACKING_URI": store}, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    for _ in range(240):
        try:
            urllib.request.urlopen(f"{url}/health", timeout=1)
            break
        except OSError:
            assert server.poll() is None, "the server ended"
            time.sleep(0.5)
    yield url
    os.killpg(server.pid, signal.SIGTERM)
    server.wait(timeout=30)


def link_to(page, name):
    """Return the link to a run in the list of runs; its model has another link with the same name."""
    return page.locator("[col-id='attributes.`Run Name`']").get_by_role("link", name=name, exact=True)


@pytest.fixture
def page(address):
    """The list of runs."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = browser.new_page(viewport={"width": 1600, "height": 1300})
        page.set_default_timeout(SLOW)
        page.goto(f"{address}/#/experiments/1/runs", wait_until="domcontentloaded")
        expect(page.get_by_text("fspo-0").first).to_be_visible(timeout=SLOW)
        if page.get_by_role("button", name="Close").count():
            page.get_by_role("button", name="Close").first.click()
        expect(link_to(page, "fspo-0")).to_be_visible(timeout=SLOW)
        yield page
        browser.close()


@pytest.fixture
def run_page(page, store):
    """Open a part of the page of the sweep's first run of fspo."""
    client = MlflowClient(store)
    (run,) = client.search_runs(["1"], "tags.mlflow.runName = 'fspo-0'")

    def open_part(part=""):
        page.goto(f"{page.url.partition('#')[0]}#/experiments/1/runs/{run.info.run_id}/{part}", wait_until="domcontentloaded")
        expect(page.get_by_role("heading", name="fspo-0").first).to_be_visible(timeout=SLOW)
        return page

    return open_part


def keep(page, name):
    if folder := os.environ.get("RLZOO_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def test_the_saved_view_shows_which_rule_is_best_and_which_is_most_even(page, address, store):
    """Read the page at the address that `rlzoo ui` prints, as text."""
    page.goto(f"{address}{view_path('1')}", wait_until="domcontentloaded")
    for text in (NAME, "Group: fspo", "Group: gspo", *SECTIONS):
        expect(page.get_by_text(text).first).to_be_visible(timeout=SLOW)
    cut = """all => all.filter(one => one.scrollWidth > one.clientWidth).map(one => one.innerText)"""
    for name, metrics in SECTIONS.items():
        for title in (name, *metrics):
            assert not page.get_by_text(title, exact=True).evaluate_all(cut), title
    for metric in ("accuracy", "lre_at_0.1"):
        card = page.get_by_test_id("experiment-view-compare-runs-card").filter(has_text=metric).first
        expect(card.locator(".js-plotly-plot")).to_be_visible(timeout=SLOW)
        shown = card.inner_text().split("\n")
        for rule in ("fspo", "gspo"):
            assert rule in shown, shown
            runs = MlflowClient(store).search_runs(["1"], f"tags.rl_rule = '{rule}'")
            mean = sum(run.data.metrics[metric] for run in runs) / len(runs)
            assert f"{mean:.2f}" in shown, (rule, metric, mean, shown)
    keep(page, "view")


def test_a_rule_has_the_same_colour_as_in_reports(page, address):
    page.goto(f"{address}{view_path('1')}", wait_until="domcontentloaded")
    expect(page.get_by_text("Group: fspo").first).to_be_visible(timeout=SLOW)
    for rule in ("fspo", "gspo"):
        row = page.locator(".ag-row").filter(has_text=f"Group: {rule}").first
        assert row.locator("input[type=color]").first.input_value() == rule_colour(rule)


def test_the_runs_of_a_sweep_are_listed_by_name(page):
    for name in ("fspo-0", "fspo-1", "gspo-0", "gspo-1"):
        expect(link_to(page, name)).to_be_visible()
    keep(page, "runs")


def test_selected_runs_are_compared_by_name_settings_and_metrics(page):
    names = [name for name in ("fspo-0", "gspo-0", "rloo-0", "grpo-0") if link_to(page, name).count()]
    for name in names:
        index = page.locator(".ag-row", has=link_to(page, name)).first.get_attribute("row-index")
        page.locator(f".ag-row[row-index='{index}'] .ag-selection-checkbox input").first.click(force=True)
    page.get_by_role("button", name="Compare", exact=True).click()
    expect(page.get_by_text(f"Comparing {len(names)} Runs")).to_be_visible(timeout=SLOW)
    for word in (*names, "clip.name", "clip.width_high", "learner.lr", *GLANCE):
        expect(page.get_by_text(word, exact=True).first).to_be_attached(timeout=SLOW)
    expect(page.locator(".js-plotly-plot").first).to_be_visible(timeout=SLOW)
    page.get_by_text(GLANCE[0], exact=True).last.scroll_into_view_if_needed()
    keep(page, "compare")


def test_the_chart_view_shows_reward_clip_fraction_and_fairness_of_every_run(page):
    page.goto(page.url + "&compareRunsMode=CHART", wait_until="domcontentloaded")
    expect(page.get_by_text("fspo-0").first).to_be_visible(timeout=SLOW)
    search = page.get_by_placeholder("Search metric charts")
    expect(search).to_be_visible(timeout=SLOW)
    for metric in CURVES:
        search.fill(metric)
        card = page.get_by_text(metric, exact=True).first
        expect(card).to_be_visible(timeout=SLOW)
        expect(page.locator(".js-plotly-plot").first).to_be_visible(timeout=SLOW)
    search.fill(f"^({'|'.join(CURVES)})$")
    for metric in CURVES:
        expect(page.get_by_text(metric, exact=True).first).to_be_visible(timeout=SLOW)
    expect(page.locator(".js-plotly-plot")).to_have_count(len(CURVES), timeout=SLOW)
    keep(page, "charts")


def test_a_run_page_shows_the_description_and_the_typed_command(run_page):
    page = run_page()
    expect(page.get_by_text("fspo on arithmetic, model embedded, seed 0").first).to_be_visible(timeout=SLOW)
    if (more := page.get_by_text("Show more", exact=True).first).is_visible():
        more.click()
    expect(page.get_by_text("rlzoo train --resume --output").first).to_be_visible(timeout=SLOW)
    keep(page, "run")


def test_system_metrics_have_separate_charts(run_page):
    page = run_page("system-metrics")
    expect(page.get_by_text("cpu_utilization_percentage").first).to_be_visible(timeout=SLOW)
    expect(page.locator(".js-plotly-plot").first).to_be_visible(timeout=SLOW)


def test_two_clicks_from_a_run_show_what_its_rule_clipped_and_where(run_page):
    page = run_page()
    page.get_by_role("tab", name="Artifacts").or_(page.get_by_role("link", name="Artifacts")).first.click()
    page.get_by_text("completions.html", exact=True).first.click()
    shown = page.frame_locator("iframe")
    expect(shown.get_by_role("heading", name=f"fspo-0: what the rule clipped in step {STEPS}")).to_be_visible(timeout=SLOW)
    headings = shown.locator("section h2").all_inner_texts()
    assert len(headings) == 16
    whole = [heading for heading in headings if heading.endswith("clipped: whole response")]
    marks = [section.locator("pre i.c").count() for section in shown.locator("section").all()]
    assert sum(mark > 0 for mark in marks) == len(whole)
    shown.get_by_role("button", name="judged log-ratio").click()
    judged = shown.locator("tbody td:nth-child(6)").evaluate_all("all => all.map(one => Number(one.dataset.value))")
    assert judged == sorted(judged, reverse=True)
    link = shown.locator("tbody a").last
    link.click()
    expect(shown.locator(f"{link.get_attribute('href')} h2")).to_be_in_viewport(timeout=SLOW)
    keep(page, "completions-page")
