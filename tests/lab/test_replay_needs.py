"""A recording gives a rule the inputs that it needs, as the run's own rule received them; missing inputs are an error."""

from typing import ClassVar

import pytest
import torch
from rlzoo_grpo import GRPO

from rlzoo import UserError, hookimpl, ops
from rlzoo.core.types import NEEDS
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import clip_fraction, replay
from tests.quick import quick_run


class Watching(GRPO):
    """GRPO that stores its inputs, and cuts tokens of low entropy."""

    name, scope, needs = "watching", "batch", frozenset(NEEDS)
    seen: ClassVar[list] = []

    def __call__(self, inputs):
        self.seen.append(inputs)
        return super().__call__(inputs)


class Modest(GRPO):
    """GRPO that needs only what every run records."""

    name, needs = "modest", frozenset(NEEDS) - {"group_ids", "old_entropy", "ref_log_probs"}


class Entropic(GRPO):
    """GRPO that needs the entropy."""

    name, needs = "entropic", frozenset({"old_entropy"})


class Grouped(GRPO):
    """GRPO that needs the group."""

    name, scope, needs = "grouped", "batch", frozenset({"group_ids"})


@hookimpl
def rlzoo_clip_policies():
    """Return the rules, so that this file can be used as a plugin."""
    return [Watching]


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A run of the rule that needs everything, with the rule's inputs in each update."""
    file = tmp_path_factory.mktemp("plugin") / "watching.py"
    file.write_text("from tests.lab.test_replay_needs import rlzoo_clip_policies as rlzoo_clip_policies\n")
    Watching.seen.clear()
    run = quick_run(tmp_path_factory.mktemp("runs") / "run", "watching", f"plugins=[{file}]", steps=2)
    return RecordedRun.read(run.path), [inputs for inputs in Watching.seen if len(inputs.log_probs) == 12][::2]


@pytest.mark.long
def test_a_recording_provides_the_inputs_of_the_run_rule(watched):
    run, seen = watched
    assert len(seen) == len(run.updates) == 8
    for update, inputs in zip(run.updates, seen, strict=True):
        mask, again = inputs.response_mask, update.inputs
        assert torch.equal(again.response_mask, mask)
        assert (again.max_length, again.progress) == (inputs.max_length, inputs.progress)
        for name in sorted(set(NEEDS) - {"max_length", "progress"}):
            got, expected = getattr(again, name), getattr(inputs, name)
            if expected.shape == mask.shape:
                got, expected = got[mask], expected[mask]
            torch.testing.assert_close(got, expected, msg=name)
    assert replay(run, Watching()).profile.clip_fraction == pytest.approx(clip_fraction(run, Watching()))
    assert replay(run, Grouped()).profile.clip_fraction == pytest.approx(replay(run, GRPO()).profile.clip_fraction)


@pytest.mark.long
def test_an_input_that_was_not_recorded_is_refused(recorded):
    assert replay(recorded, Modest()).table.length.numel() == recorded.num_responses
    with pytest.raises(
        UserError, match=r"entropic needs old_entropy, which .* did not record; replay a run whose rule also needs it"
    ):
        replay(recorded, Entropic())
    for function in (lambda: replay(recorded, Grouped()), lambda: clip_fraction(recorded, Grouped())):
        with pytest.raises(
            UserError, match=r"grouped needs all responses to a prompt together, but the minibatches of .* split them"
        ):
            function()


def test_a_rule_gets_the_tokens_of_the_response_and_not_of_the_prompt(recorded):
    update = recorded.updates[0]
    for row, sequence in enumerate(update.batch.sequences[row] for row in update.rows):
        length = int(ops.lengths(update.inputs.response_mask)[row])
        assert update.inputs.token_ids[row, :length].tolist() == sequence[-length:].tolist()
