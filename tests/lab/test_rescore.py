"""Rescored files have the checkpoints' log-probs, computed independently, and keep everything else."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlzoo import load_zoo
from rlzoo.core.errors import UserError
from rlzoo.journal.rollout_file import RolloutFile
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import replay
from rlzoo.lab.rescore import rescore
from tests.quick import quick_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Four steps with a checkpoint after each."""
    return quick_run(
        tmp_path_factory.mktemp("rescore") / "run",
        "fspo",
        "checkpoint.every=1",
        "checkpoint.keep=9",
        "learner.num_minibatches=2",
    ).path


def by_hand(folder, step, temperature):
    """Return log-probs and entropies of the generated tokens by one plain transformers pass per response, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    log_probs, entropies = [], []
    sequences = step.token_ids.split(step.sequence_lengths.tolist())
    masks = step.response_mask.split(step.sequence_lengths.tolist())
    for ids, mask in zip(sequences, masks, strict=True):
        with torch.no_grad():
            all_log_probs = (model(ids[None]).logits[0] / temperature).log_softmax(-1)
        chosen = mask.nonzero()[:, 0]
        log_probs.append(all_log_probs[chosen - 1, ids[chosen]])
        entropies.append(-(all_log_probs.exp() * all_log_probs).sum(-1)[chosen - 1])
    return torch.cat(log_probs), torch.cat(entropies)


@pytest.mark.long
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_log_probs_are_those_of_the_checkpoint(run, tmp_path, temperature):
    source = RolloutFile.load(run / "rollouts" / "000002.safetensors")
    dataclasses.replace(source, temperature=temperature).save(tmp_path / "000002.safetensors")
    first, last = (str(run / "checkpoints" / f"step-00000{step}") for step in (1, 3))
    (file,) = rescore([tmp_path], tmp_path / "new", [last], old=first, ref="embedded")
    made = RolloutFile.load(file)
    for folder, log_probs in ((first, made.old_log_probs), (last, made.updates[0].log_probs)):
        expected, entropy = by_hand(folder, source, temperature)
        torch.testing.assert_close(log_probs.double(), expected, atol=2e-5, rtol=0)
        if folder == first:
            torch.testing.assert_close(made.old_entropy.double(), entropy, atol=1e-4, rtol=0)
    assert made.updates[0].rows.tolist() == list(range(len(source)))
    assert len(made.updates) == 1
    assert made.ref_log_probs is not None
    for name in ("token_ids", "response_mask", "rewards", "advantages", "rollout_log_probs", "group_ids"):
        assert torch.equal(getattr(made, name), getattr(source, name)), name


@pytest.mark.long
def test_the_sampling_checkpoint_gives_the_old_log_probs(run, tmp_path):
    rescore([run], tmp_path / "new", old=str(run / "checkpoints" / "step-000002"))
    made, source = (RolloutFile.load(folder / "000003.safetensors") for folder in (tmp_path / "new", run / "rollouts"))
    torch.testing.assert_close(made.old_log_probs, source.old_log_probs, atol=1e-4, rtol=0)
    assert [update.rows.tolist() for update in made.updates] == [update.rows.tolist() for update in source.updates]
    assert torch.equal(made.updates[1].log_probs, source.updates[1].log_probs)  # the recorded updates are kept


def test_a_dump_with_only_the_samplers_log_probs_is_replayed_at_two_distances(run, tmp_path):
    source = RolloutFile.load(run / "rollouts" / "000001.safetensors")
    bare = dataclasses.replace(source, old_log_probs=None, old_entropy=None, ref_log_probs=None, advantages=None, updates=())
    bare.save(tmp_path / "dump.safetensors")
    with pytest.raises(UserError, match="`rlzoo rescore` computes"):
        RecordedRun.read(tmp_path / "dump.safetensors")
    models = [str(run / "checkpoints" / f"step-00000{step}") for step in (1, 3)]
    with pytest.raises(UserError, match=r"no old_log_probs, the denominator of the ratio: .* --old sampler"):
        rescore([tmp_path / "dump.safetensors"], tmp_path / "new", models)
    rescore([tmp_path / "dump.safetensors"], tmp_path / "new", models, old="sampler")
    found = RecordedRun.read(tmp_path / "new")
    near, far = (
        float((update.inputs.log_probs - update.inputs.old_log_probs).sum(-1).square().mean()) for update in found.updates
    )
    assert far > 1.5 * near > 0
    assert 0 < replay(found, load_zoo()["fspo"]()).profile.clip_fraction < 1


def test_an_input_that_cannot_be_rescored_is_refused_before_writing(run, tmp_path):
    output = tmp_path / "new"
    with pytest.raises(UserError, match="nothing to compute: specify checkpoints"):
        rescore([run], output)
    with pytest.raises(UserError, match="does not exist"):
        rescore([tmp_path / "missing"], output, ["embedded"])
    with pytest.raises(UserError, match=r"model.path='nowhere/at-all'"):
        rescore([run], output, ["nowhere/at-all"])
    source = RolloutFile.load(run / "rollouts" / "000001.safetensors")
    dataclasses.replace(source, token_ids=source.token_ids + 1000).save(tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="pass a checkpoint of the model that generated the rollouts"):
        rescore([tmp_path / "other.safetensors"], output, ["embedded"])
    dataclasses.replace(source, old_log_probs=source.old_log_probs - 9).save(tmp_path / "far.safetensors")
    with pytest.raises(UserError, match=r"differ from the recorded ones by 9.0 nats"):
        rescore([tmp_path / "far.safetensors"], output, ["embedded"])
    assert not output.exists()
    output.mkdir()
    (output / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        rescore([run], output, ["embedded"])
    assert [path.name for path in output.iterdir()] == ["mine.txt"]
