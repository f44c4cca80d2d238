"""How to install an extra depends on where rlzoo was installed from."""

import json
from importlib import metadata

import pytest

from rlzoo.support import extras
from rlzoo.support.extras import how_to_install


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": "file:///home/me/my%20zoo", "dir_info": {"editable": True}}, "pip install -e '/home/me/my zoo[lora]'"),
        ({"url": "file:///home/me/rlzoo", "dir_info": {}}, "pip install '/home/me/rlzoo[lora]'"),
    ],
)
def test_an_extra_comes_from_the_folder_that_rlzoo_came_from(monkeypatch, tmp_path, origin, command):
    install_from(origin, monkeypatch, tmp_path)
    assert how_to_install("lora") == command


@pytest.mark.parametrize("origin", [None, {"url": "file:///home/me/rlzoo_llm-0.2.0-py3-none-any.whl", "archive_info": {}}])
def test_a_wheel_names_the_package_index_only_after_the_release(monkeypatch, tmp_path, origin):
    install_from(origin, monkeypatch, tmp_path)
    assert how_to_install("lora") == "pip install 'PATH_OF_YOUR_CLONE[lora]'"
    monkeypatch.setattr(extras, "PUBLISHED", True)
    assert how_to_install("lora") == "pip install 'rlzoo-llm[lora]'"
    assert how_to_install(options="--no-deps ") == "pip install --no-deps 'rlzoo-llm'"


def install_from(origin, monkeypatch, tmp_path):
    (tmp_path / "METADATA").write_text("Name: rlzoo-llm\nVersion: 0.2.0\n")
    if origin:
        (tmp_path / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.setattr(metadata, "distribution", lambda name: metadata.PathDistribution(tmp_path))
