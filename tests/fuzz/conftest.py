"""A small run that tests can damage, and a report of the number of cases at the end."""

import logging

import pytest

from tests.fuzz.law import SURFACES, memory_limit, report
from tests.quick import quick_run


@pytest.fixture(autouse=True)
def _limited():
    level = logging.getLogger("rlzoo").level
    logging.getLogger("rlzoo").setLevel(logging.CRITICAL)  # thousands of warnings about damaged checkpoints
    with memory_limit():
        yield
    logging.getLogger("rlzoo").setLevel(level)


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """The directory of a run of two steps with checkpoints."""
    settings = ["rollout.num_prompts=3", "checkpoint.every=1"]
    return quick_run(tmp_path_factory.mktemp("fuzz") / "run", "fspo", *settings, steps=2).path


@pytest.fixture(scope="session", autouse=True)
def _counted(request):
    yield
    if any(surface.cases for surface in SURFACES.values()):
        lines = report()
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"\n{lines}")
