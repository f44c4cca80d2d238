"""Discovery through the public door: entry points, duplicates, and what is no policy."""

import importlib
import sys
from importlib import metadata

import pytest

from rlzoo import ClipPolicy, UserError, load_zoo

PLUGIN = """
from rlzoo import ClipPolicy, hookimpl, ops

class {kind}(ClipPolicy):
    "Does not clip."
    name, paper, scope = "{name}", "none", "token"
    def __call__(self, inputs):
        return ops.clipped_surrogate(ops.log_ratio(inputs), inputs.advantages, band=None)

@hookimpl
def rlzoo_clip_policies():
    return {returned}
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a distribution with one plugin module on the path, as pip would."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(distribution, entry, source):
        module = distribution.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[rlzoo]\n{entry} = {module}\n")
        monkeypatch.delitem(sys.modules, module, raising=False)
        importlib.invalidate_caches()

    return write


def test_bundled_policies_are_found_by_entry_point_and_sorted():
    zoo = load_zoo()
    assert list(zoo) == ["fspo", "grpo", "gspo", "rloo"]
    assert all(issubclass(policy, ClipPolicy) and policy.name == name for name, policy in zoo.items())
    assert zoo.entries["fspo"].source == f"rlzoo {metadata.version('rlzoo')}"


def test_a_third_party_policy_joins_them(install):
    install("third-party", "third", PLUGIN.format(kind="Third", name="free", returned="[Third]"))
    zoo = load_zoo()
    assert zoo.entries["free"].source == "third-party 1.2"
    assert zoo["free"]().reduction == "sequence_mean"


def test_a_taken_policy_name_is_refused_with_both_sources(install):
    install("third-party", "third", PLUGIN.format(kind="Third", name="fspo", returned="[Third]"))
    with pytest.raises(UserError, match=r"'fspo' is in .* and in .*; uninstall one"):
        load_zoo()


def test_a_taken_plugin_name_is_refused(install):
    # pluggy would ignore the second one without a word
    install("third-party", "fspo", PLUGIN.format(kind="Third", name="free", returned="[Third]"))
    with pytest.raises(UserError, match="two plugins are called 'fspo'"):
        load_zoo()


def test_what_is_no_policy_is_named(install):
    install("third-party", "third", PLUGIN.format(kind="Third", name="free", returned="[Third()]"))
    with pytest.raises(UserError, match=r"plugin 'third' of third-party 1.2 returned Third\(.*\): not a ClipPolicy class"):
        load_zoo()


def test_a_misspelt_hook_is_named(install):
    source = PLUGIN.format(kind="Third", name="free", returned="[Third]")
    install("third-party", "third", source.replace("rlzoo_clip_policies", "rlzoo_clip_polices"))
    with pytest.raises(UserError, match="unknown hook 'rlzoo_clip_polices'"):
        load_zoo()


def test_a_plugin_that_cannot_be_imported_is_named(install):
    install("third-party", "third", "import no_such_library\n")
    with pytest.raises(UserError, match=r"'third' of third-party 1.2 cannot be imported: No module named"):
        load_zoo()
