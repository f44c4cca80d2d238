"""`--set KEY=VALUE`: any text is accepted, or rejected in one line that names it."""

import json

from hypothesis import strategies as st

from rlzoo.config.composition import parse_overrides
from rlzoo.config.run_config import RunConfig
from tests.fuzz.law import SURFACES, held_to_the_law
from tests.fuzz.spoiled import ODD_TEXTS, spoiled_bytes, trees

SURFACE = SURFACES["overrides"]
REAL = [
    *(
        "learner.lr=1e-5",
        "clip.width_high=0.05",
        "clip.name=gspo",
        "task.name=arithmetic",
        "steps=3",
        "plugins=[]",
        "output=runs/x",
    ),
    *("learner.betas=[0.9, 0.95]", "rollout={num_prompts: 4, group_size: 2}", "per_clip.fspo.steps=3", "model.path=a/b"),
]
KEYS = [
    "clip",
    "task",
    "plugins",
    "output",
    "per_clip",
    "per_clip.fspo",
    "per_clip.fspo.clip",
    "reward.kl_coef",
    "seed",
    "steps",
]
KEYS += [
    "learner.lora",
    "task.options",
    "task.template",
    "clip.name",
    "clip.reduction",
    "rollout.vllm.server",
    "x",
    "a." * 300 + "a",
]


def compose(*overrides):
    return RunConfig.compose(clip=None, overrides=overrides)


@held_to_the_law("overrides", 0.5, text=spoiled_bytes([text.encode() for text in REAL]))
def test_corrupted_overrides(text):
    override = text.decode(errors="surrogateescape")  # as Python decodes its arguments
    SURFACE.check(lambda: compose(override), *_names(override))


@held_to_the_law("overrides", 0.3, key=st.sampled_from(KEYS), value=trees, second=st.sampled_from(REAL))
def test_any_value_for_any_key(key, value, second):
    overrides = [f"{key}={json.dumps(value)}", second]
    SURFACE.check(lambda: compose(*overrides), *_names(*overrides))


@held_to_the_law("overrides", 0.2, text=st.text(max_size=60) | st.sampled_from(ODD_TEXTS), value=st.text(max_size=20))
def test_generated_overrides(text, value):
    SURFACE.check(lambda: parse_overrides([f"{text}={value}", text]), *_names(text))


def _names(*overrides):
    """Return what an error may name: the option, or a section of the configuration."""
    return "--set", *RunConfig.model_fields, "unknown rule", "per_clip", "plugin '"
