"""Config files: a run is composed from any content, or one line says why not."""

import yaml
from hypothesis import strategies as st

from rlzoo.config.composition import config_folders, config_names
from rlzoo.config.run_config import RunConfig
from tests.fuzz.law import SURFACES, held_to_the_law
from tests.fuzz.spoiled import ODD_TEXTS, spoiled_bytes, spoiled_trees

SURFACE = SURFACES["config files"]
TEXTS = [(config_folders()[0] / f"{name}.yaml").read_bytes() for name in config_names()]
WHOLE = RunConfig.compose(clip="fspo").model_dump(mode="json")
TREES = [
    WHOLE,
    {
        **WHOLE,
        "clip": {"name": "grpo", "dual_clip": 3.0},
        "task": {"name": "reasoning_gym:chain_sum", "options": {"min_terms": 2}},
    },
    *(yaml.safe_load(text) for text in TEXTS),
]
NAMES = [*RunConfig.model_fields, "is not a file", "is not installed", "plugin '"]  # the key, if it is not the file
FROM_NOTHING = st.text(max_size=200) | st.lists(
    st.sampled_from(["a", "&b ", "*b", ": ", "\n", "- ", "[", "]", "{", "}", "!!set ", "? "])
).map("".join)


def compose(file):
    config = RunConfig.compose([file])
    again = file.with_name("again.yaml")
    again.write_text(config.to_yaml(), encoding="utf-8")
    assert RunConfig.compose([again]) == config  # accepted configurations can be written and read again


@held_to_the_law("config files", 0.45, content=spoiled_bytes(TEXTS))
def test_corrupted_config_files(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "config.yaml"
    file.write_bytes(content)
    SURFACE.check(lambda: compose(file), str(file), *NAMES)


@held_to_the_law("config files", 0.45, tree=spoiled_trees(TREES))
def test_configs_with_other_values(tmp_path_factory, tree):
    file = tmp_path_factory.getbasetemp() / "config.yaml"
    file.write_text(yaml.safe_dump(tree, allow_unicode=False), encoding="utf-8")
    SURFACE.check(lambda: compose(file), str(file), *NAMES)


@held_to_the_law("config files", 0.05, text=FROM_NOTHING)
def test_generated_config_files(tmp_path_factory, text):
    file = tmp_path_factory.getbasetemp() / "config.yaml"
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    SURFACE.check(lambda: compose(file), str(file), *NAMES)


@held_to_the_law("config files", 0.05, name=st.sampled_from(ODD_TEXTS) | st.text(max_size=50))
def test_names_of_config_files(name):
    SURFACE.check(lambda: RunConfig.compose([name]), "no config", "config", *NAMES)
