"""The cosine equals one computed from gradients by plain autograd through the whole objective, row by row."""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file

from rlzoo import ClipInputs, load_zoo, ops
from rlzoo.core.errors import UserError
from rlzoo.core.fairness import bin_index
from rlzoo.lab.cosine import cosines, has_weights
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import replay
from rlzoo.models.pretrained import load_pretrained
from tests.off_policy import plain_log_probs

NAMES = ["fspo", "gspo", "rloo", "grpo"]
SETTINGS = {"fspo": {"width_low": 0.01, "width_high": 0.01}, "grpo": {"clip_low": 0.01, "clip_high": 0.01}}


def policies():
    return {name: load_zoo()[name](**SETTINGS.get(name, {})) for name in NAMES}


def plain_gradient(model, update, objective, rows):
    """Return d/dtheta of the mean over the update's responses of an objective, by autograd, row by row."""
    total = torch.zeros(())
    for row in rows:
        length = int(update.inputs.response_mask[row].sum())
        log_probs = plain_log_probs(model, update.batch.sequences[update.rows[row]], length)[None]
        total = total + objective(row, length, log_probs)
    grads = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    return torch.cat([grad.flatten().double() for grad in grads if grad is not None])


@pytest.mark.long
def test_the_cosine_is_that_of_plain_autograd(recorded):
    replayed = {name: replay(recorded, policy) for name, policy in policies().items()}
    edges = replayed["fspo"].profile.edges
    found = cosines(recorded, {name: each.states for name, each in replayed.items()}, edges)
    model, _ = load_pretrained("embedded")
    expected = {name: [] for name in NAMES}
    in_bin = {name: [] for name in NAMES}
    kept = [update for update in recorded.updates if update.step % 2 == 0]
    for update in kept:
        load_model(model, recorded.path / "replay" / f"{update.step:06d}-{update.index}.safetensors")
        everything = range(len(update.rows))
        bins = bin_index(update.inputs.response_mask.sum(-1), torch.tensor(edges))
        second = (bins == 1).nonzero()[:, 0].tolist()

        def inputs_of(row, length, log_probs, update=update):
            old = update.inputs.old_log_probs[row : row + 1, :length]
            mask = torch.ones(1, length, dtype=torch.bool)
            return ClipInputs(log_probs, old, update.inputs.advantages[row : row + 1], mask)

        def unclipped(row, length, log_probs, of=inputs_of):
            inputs = of(row, length, log_probs)
            return (ops.log_ratio(inputs).sum().exp() * inputs.advantages).sum()

        for name, policy in policies().items():

            def clipped(row, length, log_probs, of=inputs_of, policy=policy):
                return policy(of(row, length, log_probs)).objective.mean()  # per token: the mean over the response

            for rows, kept_in in ((everything, expected), (second, in_bin)):
                if not rows:  # no response of this update is in this bin
                    kept_in[name].append(math.nan)
                    continue
                first, other = (plain_gradient(model, update, objective, rows) for objective in (clipped, unclipped))
                kept_in[name].append(float(first @ other / (first.norm() * other.norm())))
    for name in NAMES:
        assert found[name].num_updates == len(kept) == 8
        assert found[name].mean == pytest.approx(sum(expected[name]) / len(kept), abs=2e-3), name
        cosine = [value for value in in_bin[name] if not math.isnan(value)]
        assert found[name].by_length[1] == pytest.approx(sum(cosine) / len(cosine), abs=5e-3), name
        assert found[name].mean < 0.999, "nothing was clipped"


def test_a_rule_that_weighs_by_the_ratio_without_clipping_has_cosine_1(recorded):
    wide = load_zoo()["rloo"](clip_low=0.999, clip_high=100.0)
    found = cosines(recorded, {"wide": [wide] * len(recorded.updates)}, (0, 1, 2, 3, 4, 5, 100))
    assert found["wide"].mean == pytest.approx(1.0, abs=1e-4)
    assert found["wide"].interval is None or found["wide"].interval[0] > 0.999


def test_weights_of_another_run_are_refused(recorded, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(recorded.path, copy)
    for file in (copy / "replay").glob("*.safetensors"):
        save_file({name: tensor * 1.1 for name, tensor in load_file(file).items()}, file)
    run = RecordedRun.read(copy, own_code=True)
    assert has_weights(run)
    with pytest.raises(UserError, match="the weights do not belong to this recording"):
        cosines(run, {"grpo": [load_zoo()["grpo"]()] * len(run.updates)}, (0, 1, 2, 3, 4, 5, 100))
    shutil.rmtree(copy / "replay")
    assert not has_weights(run)
