"""How to install an extra depends on where rlzoo was installed from."""

import json
from importlib import metadata

import pytest

from rlzoo.support.extras import how_to_install


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'rlzoo-llm[lora]'"),
        ({"url": "file:///home/me/my%20zoo", "dir_info": {"editable": True}}, "pip install -e '/home/me/my zoo[lora]'"),
        ({"url": "file:///home/me/rlzoo", "dir_info": {}}, "pip install '/home/me/rlzoo[lora]'"),
        ({"url": "file:///home/me/rlzoo_llm-0.2.0-py3-none-any.whl", "archive_info": {}}, "pip install 'rlzoo-llm[lora]'"),
    ],
)
def test_an_extra_comes_from_where_rlzoo_came_from(monkeypatch, tmp_path, origin, command):
    (tmp_path / "METADATA").write_text("Name: rlzoo-llm\nVersion: 0.2.0\n")
    if origin:
        (tmp_path / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.setattr(metadata, "distribution", lambda name: metadata.PathDistribution(tmp_path))
    assert how_to_install("lora") == command
