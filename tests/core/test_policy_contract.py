"""Names that a policy declares are resolved when it is loaded: unknown or taken names are rejected in one line."""

from typing import Annotated, ClassVar, Literal

import pytest
import torch
from pydantic import Field

from rlzoo import Advantage, ClipPolicy, Reduction, RunConfig, UserError, load_zoo, ops
from rlzoo.core.policy import contract_problem
from rlzoo.core.reductions import StepCounts, kl_estimate, reduce_objective

SOURCE = '''
from typing import Annotated, ClassVar, Literal
from pydantic import Field
from rlzoo import Advantage, ClipPolicy, Reduction, hookimpl, ops

class P(ClipPolicy):
    """Does not clip."""
    name, paper, scope = "p", "none", "token"
    {line}
    def __call__(self, inputs):
        return ops.clipped_surrogate(ops.log_ratio(inputs), inputs.advantages, band=None)

@hookimpl
def rlzoo_clip_policies():
    return [P]
'''
REFUSED = {
    "advantage: ClassVar = 'raw'": "it declares 'advantage' as a class variable, but it is a field",
    "advantage: Advantage = 'mine'": "unknown advantage estimator 'mine' (installed: batch_norm, gae, gdpo, gigpo,",
    "advantage: Advantage = {'name': 'pass_at_k', 'k': 1}": "its default advantage.k=1: input should be greater than",
    "reduction: Reduction = Field('my_mean')": "it has the default 'my_mean' for 'reduction' (known: token_mean,",
    "scaled: float = 1.0": "it declares 'scaled', which is reserved in every rule; choose another name",
    "updated: bool = False": "it declares 'updated', which is reserved",
    "replace: bool = False": "it declares 'replace', which is reserved",
    "copy: int = 0": "it declares 'copy', which is reserved",
    "model_fields_set: int = 0": "it declares 'model_fields_set', which is reserved",
    "name: str = 'p'": "it declares 'name' as a field, but it is a class variable: write name = ... without an annotation",
    "exempt: dict = {}": "it declares 'exempt' as a field, but it is a class variable",
    "def replace(self, **settings): return self": "it declares 'replace', which is reserved in every rule",
    "def width_fields(self): return ('x',)": "it declares 'width_fields', which is reserved",
    "def model_dump(self): return {}": "it declares 'model_dump', which is reserved",
    "def _reduction_suits_scope(self): return self": "it declares '_reduction_suits_scope', which is reserved",
}  # fmt: skip


@pytest.fixture
def written(tmp_path):
    """Write the plugin with a line in its policy; returns the file."""

    def write(line):
        file = tmp_path / "p.py"
        file.write_text(SOURCE.format(line=line))
        return file

    return write


@pytest.mark.filterwarnings("ignore")  # pydantic warns about some of these names, which is not an error outside of tests
@pytest.mark.parametrize(("line", "reason"), REFUSED.items(), ids=list(REFUSED))
def test_an_unknown_or_reserved_name_is_refused_when_the_plugin_is_loaded(written, line, reason):
    with pytest.raises(UserError) as error:
        RunConfig.compose(clip="p", plugins=[written(line)])
    assert f"cannot be used: {reason}" in str(error.value)


@pytest.mark.parametrize(
    "line",
    [
        "advantage: Literal['raw', 'batch_norm'] = 'raw'",
        "reduction: Reduction = Field('token_mean')",
        "watch: ClassVar = {'clip/fraction': 'x'}",
        "width: float = Field(0.5, gt=0)\n    def scaled(self, factor): return self",
        "def updated(self, stats): return self",
        "_cache: dict = {}",
        "def __repr__(self): return 'P'",
    ],
)
def test_allowed_attributes_may_be_overridden(written, line):
    assert RunConfig.compose(clip="p", plugins=[written(line)]).clip.name == "p"


def test_a_narrowed_advantage_field_refuses_other_names(written):
    file = written("advantage: Literal['raw', 'batch_norm'] = 'raw'")
    with pytest.raises(UserError, match=r"clip\.advantage='group_norm': input should be 'raw' or 'batch_norm'"):
        RunConfig.compose(clip="p", plugins=[file], overrides=["clip.advantage=group_norm"])


def test_an_unknown_reduction_is_refused_where_it_is_applied():
    objective, mask = torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(UserError, match=r"unknown reduction 'my_mean' \(known: token_mean, "):
        reduce_objective(objective, mask, "my_mean", StepCounts(num_responses=1, num_tokens=2))
    with pytest.raises(UserError, match=r"unknown KL estimator 'k4' \(known: k1, k2, k3, unbiased_k3\)"):
        kl_estimate(objective, objective, "k4")


def test_a_field_without_a_default_is_refused(written):
    with pytest.raises(
        UserError, match=r"rule 'p' cannot be used: it cannot be constructed with its defaults: must: field req"
    ):
        RunConfig.compose(clip="p", plugins=[written("must: float")], overrides=["clip.must=0.5"])


def test_a_default_of_the_wrong_type_is_refused(written):
    with pytest.raises(
        UserError, match="rule 'p' cannot be used: it cannot be constructed with its defaults: low: input should"
    ):
        RunConfig.compose(clip="p", plugins=[written('low: float = "wide"')])


def test_a_policy_created_in_python_is_checked_too():
    class Mine(ClipPolicy):
        name, paper, scope = "mine", "none", "token"
        reduction: Reduction = "my_mean"

        def __call__(self, inputs):
            return ops.clipped_surrogate(ops.log_ratio(inputs), inputs.advantages, band=None)

    with pytest.raises(ValueError, match=r"rule .*Mine has the default 'my_mean' for 'reduction'"):
        RunConfig(clip=Mine())


def test_every_policy_of_the_zoo_keeps_the_contract():
    assert {name: problem for name, policy in load_zoo().items() if (problem := contract_problem(policy))} == {}


def test_a_policy_derived_from_another_may_change_its_settings_and_class_variables():
    class Base(ClipPolicy):
        name, paper, scope = "base", "none", "token"
        width: Annotated[float, Field(gt=0)] = 0.5
        advantage: Advantage = Field("raw", description="narrow it")

        def __call__(self, inputs):
            return ops.clipped_surrogate(ops.log_ratio(inputs), inputs.advantages, band=None)

        def edges(self):
            return self.width

    class Derived(Base):
        name = "derived"
        watch: ClassVar = {"clip/fraction": "x"}
        width: Annotated[float, Field(gt=0)] = 0.25
        advantage: Literal["raw"] = "raw"

        def edges(self):
            return 2 * self.width

    assert contract_problem(Base) is None
    assert contract_problem(Derived) is None
