"""Races a rule on a track: calibrates its widths, tunes its learning rate, and trains it for each reported seed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

from rlzoo.config.run_config import RunConfig
from rlzoo.core.errors import RunError, UserError
from rlzoo.core.policy import ClipPolicy
from rlzoo.gate.fingerprint import MODEL, SCORE, VERSION, run_facts
from rlzoo.journal.run_directory import read_metrics
from rlzoo.journal.state import read_fingerprint
from rlzoo.journal.tracking.description import typed_command
from rlzoo.lab.calibrate import calibrate, overlay, pilot_config
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import replay_matched
from rlzoo.lab.results import Evenness, Record, Result, best_rate, processor, right_or_rewards, rule_hash
from rlzoo.lab.runs import read_mapping
from rlzoo.lab.sweep import Child, Sweep, last_error, log_of
from rlzoo.lab.track import Track
from rlzoo.support.atomic import write_text
from rlzoo.support.parsing import dump_yaml, parse_yaml
from rlzoo.support.reading import read_text
from rlzoo.testing import check
from rlzoo.training.train import train

PILOTS, PILOT_STEPS = 8, 10  # maximum number of pilots, and number of steps in each
TIMED_STEPS, TIMED_RUNS = 5, 3  # for each rule, to measure the time per step

RunAll = Callable[[Sweep], object]
"""A function that starts or resumes all unfinished runs of a sweep."""


def race(
    track: Track, rule: str, plugins: Sequence[str | Path], folder: Path, run_all: RunAll, say: Callable[[str], None]
) -> Result:
    """Race a rule, write the result to ``folder/RULE.json``, and return it. An existing result is returned unchanged.

    To resume an interrupted race, repeat the call. A run that fails, for example because of non-finite gradients, scores 0.

    Args:
        track: the track.
        rule: name of the rule.
        plugins: plugin files and folders that provide the rule.
        folder: folder that holds all races on this track.
        run_all: called with each sweep of the race.
        say: called with a description of each stage.

    Raises:
        UserError: the rule breaks a law, or the folder contains runs with other settings.
        RunError: the rule failed at every learning rate.
    """
    file = folder / f"{rule}.json"
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "track.yaml", dump_yaml(track.config), "race")
    base = _compose(track, rule, plugins, [folder / "track.yaml"])
    if file.exists():
        return _unchanged(Result.read(file), track, base.clip)
    refuse_broken_laws(base.clip)
    configs = [str(folder / "track.yaml"), *_widths(track, base, folder / rule / "widths.yaml", say)]
    tuning = list(_tune(track, rule, configs, plugins, folder / rule / "tuning", run_all))
    if all(record.failure for record in tuning):
        raise RunError(f"{rule} failed in all tuning runs; {tuning[0].failure}")
    rate = best_rate(tuning)
    reported = Sweep(
        folder / rule / "seeds",
        (rule,),
        track.seeds,
        tuple(configs),
        (f"learner.lr={rate:g}",),
        plugins=tuple(map(str, plugins)),
    )
    run_all(reported)
    say(f"{rule}: replay of a common recording, and time per step")
    config = reported.children[0].config
    evenness = _evenness(track, config.clip, folder / "reference", plugins)
    timed = _timed(config, _compose(track, track.reference, (), [folder / "track.yaml"]))
    facts = next(read_fingerprint(child.path) for child in reported.children if child.is_begun)
    result = Result(
        track=track.name,
        track_digest=track.digest,
        rule=rule,
        rule_hash=rule_hash(type(config.clip)),
        widths=parse_yaml(read_text(Path(configs[1]))) if len(configs) > 1 else {},
        learning_rate=rate,
        tuning=tuple(tuning),
        runs=tuple(map(record_of, reported.children)),
        evenness=evenness,
        step_seconds=timed[0],
        reference_step_seconds=timed[1],
        facts={key: value for key, value in facts.items() if key not in ("seed", "output")},
        processor=processor(),
        date=datetime.now(UTC).date().isoformat(),
        command=typed_command(),
    )
    write_text(file, result.to_json(), "race")
    return result


def _compose(track: Track, rule: str, plugins: Sequence[str | Path], configs: Sequence[str | Path]) -> RunConfig:
    """Return the configuration at the middle of the grid, with the first tuning seed."""
    lr = f"learner.lr={track.learning_rates[len(track.learning_rates) // 2]:g}"
    return RunConfig.compose(configs, clip=rule, overrides=[lr], plugins=plugins, seed=track.tuning_seeds[0])


def _widths(track: Track, base: RunConfig, file: Path, say: Callable[[str], None]) -> list[str]:
    """Calibrate the rule's widths unless this is already done. Return the config file, or [] without calibrated widths."""
    if not file.is_file():
        say(f"{base.clip.name}: calibrating its widths")
        config = base.model_copy(update={"steps": min(PILOT_STEPS, base.steps)})
        try:
            pilot = calibrate(config, track.clip_fraction, max_pilots=PILOTS, on_pilot=lambda _: None)
        except UserError as error:
            say(f"{base.clip.name} keeps its widths: {error}")
            return []
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, overlay(pilot, config), "race")
    return [str(file)]


def _tune(
    track: Track, rule: str, configs: Sequence[str], plugins: Sequence[str | Path], folder: Path, run_all: RunAll
) -> Iterator[Record]:
    """Run the grid of learning rates, and one more rate if the best one is at an edge of the grid."""
    rates, records = track.learning_rates, list[Record]()
    for _ in range(2):
        axis = f"learner.lr={','.join(f'{rate:g}' for rate in rates)}"
        sweep = Sweep(folder, (rule,), track.tuning_seeds, tuple(configs), grid=(axis,), plugins=tuple(map(str, plugins)))
        run_all(sweep)
        records += map(record_of, sweep.children)
        if not (rates := beyond(records)):
            break
    return iter(records)


def beyond(records: Sequence[Record]) -> tuple[float, ...]:
    """If the best learning rate is the highest or the lowest, return the next rate beyond it, using the grid's factor."""
    rates, best = sorted({record.learning_rate for record in records}), best_rate(records)
    if best == rates[0]:
        return (float(f"{best * best / rates[1]:.4g}"),)
    return (float(f"{best * best / rates[-2]:.4g}"),) if best == rates[-1] else ()


def record_of(child: Child) -> Record:
    """Read the record of a run that has ended; raise `RunError` if it failed for a reason other than the rule."""
    rows = read_metrics(child.path / "metrics.jsonl") if (child.path / "metrics.jsonl").is_file() else []
    seed, rate = child.config.seed, child.config.learner.lr
    number = child.config.rollout.num_prompts * child.config.rollout.group_size
    steps = [row for row in rows if row["step"]]
    tokens = round(sum(row["response/length_mean"] * number for row in steps))
    curve = tuple(round(row["reward/mean"], 4) for row in steps)
    start = next((row["eval/accuracy"] for row in rows if "eval/accuracy" in row), None)
    if not child.is_finished:
        return Record(seed=seed, learning_rate=rate, start=start, curve=curve, tokens=tokens, failure=_failure(child))
    evaluation = json.loads(read_text(child.path / "evaluations" / f"{child.config.steps:06d}.json"))
    last = steps[-max(1, len(steps) // 4) :]
    entropies = [row["learner/entropy"] for row in steps if "learner/entropy" in row]  # absent if all advantages are 0
    return Record(
        seed=seed,
        learning_rate=rate,
        start=start,
        **right_or_rewards(evaluation["rewards"]),
        curve=curve,
        tokens=tokens,
        clip_fraction=round(fmean(row.get("clip/fraction", 0.0) for row in steps), 5),
        entropy=round(fmean(entropies[-len(last) :] or [0.0]), 5),
        length=round(fmean(row["response/length_mean"] for row in last), 2),
        truncated=round(fmean(row["response/truncated"] for row in last), 4),
        seconds=round(float(read_mapping(child.path / "summary.json").get("seconds", 0.0)), 1),
    )


def _failure(child: Child) -> str:
    """Return the error that ended a run; raise `RunError` if the run was killed or the error may not recur."""
    error = last_error(child)
    if not error or error.endswith("run the same command again"):
        raise RunError(f"{child.name} did not finish: see {log_of(child)}; rerun the command to resume it")
    return error


def _evenness(track: Track, policy: ClipPolicy, folder: Path, plugins: Sequence[str | Path]) -> Evenness:
    """Replay the rule on a run of the reference rule, clipping the track's share for each sign. Train the run if needed."""
    config = _compose(track, track.reference, (), [folder.parent / "track.yaml"])
    if not read_mapping(folder / "summary.json").get("finished"):
        train(config.model_copy(update={"output": folder}), resume=(folder / "config.yaml").is_file())
    try:
        replayed = replay_matched(RecordedRun.read(folder, plugins), policy, track.clip_fraction, by_sign=True)
    except UserError as error:
        return Evenness(note=str(error))
    profile = replayed.profile
    return Evenness(
        clip_fraction=round(profile.clip_fraction, 5),
        length_error=profile.lre_max,
        interval=profile.lre_max_interval,
        note=replayed.note,
    )


def _timed(config: RunConfig, reference: RunConfig) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Train with both rules alternately in this process. Return each run's mean seconds per step, excluding the first step."""
    ours, theirs = list[float](), list[float]()
    for _ in range(TIMED_RUNS):
        for run, seconds in ((reference, theirs), (config, ours)):
            with tempfile.TemporaryDirectory(prefix="rlzoo-timed-") as folder:
                short = pilot_config(run, run.clip, Path(folder, "run")).model_copy(
                    update={"steps": min(TIMED_STEPS, run.steps)}
                )
                rows = read_metrics(train(short).path / "metrics.jsonl")
            spent = [row["time/rollout"] + row["time/learner"] for row in rows if row["step"]]
            seconds.append(round(fmean(spent[1:] or spent), 4))
    return tuple(ours), tuple(theirs)


def admit(result: Result, track: Track, plugins: Sequence[str | Path], others: Sequence[Result]) -> None:
    """Check the runs, settings, data and rule of a submitted result, and check that its model matches that of other results.

    Raises:
        UserError: the result cannot be added to the table of this track.
    """
    with tempfile.TemporaryDirectory(prefix="rlzoo-race-") as folder:
        files = [Path(folder, name) for name in ("track.yaml", "widths.yaml")]
        for file, content in zip(files, (track.config, result.widths), strict=True):
            file.write_text(dump_yaml(content), encoding="utf-8")
        lr = f"learner.lr={result.learning_rate:g}"
        config = RunConfig.compose(files, clip=result.rule, overrides=[lr], plugins=plugins, seed=track.seeds[0])
    _unchanged(result, track, config.clip)
    free = ("seed", "output", SCORE, VERSION, "plugin ")  # a hash identifies the rule, regardless of the name of its file
    asked = {key: value for key, value in json.loads(json.dumps(run_facts(config))).items() if not key.startswith(free)}
    known = [other.facts for other in others if other.rule == track.reference]
    asked |= {key: value for key, value in (known[0] if known else {}).items() if key.startswith(MODEL)}
    if names := [key for key in asked if result.facts.get(key) != asked[key]]:
        raise UserError(f"{result.rule}: {names[0]} is {result.facts.get(names[0])} in this result, but {asked[names[0]]} here")
    refuse_broken_laws(config.clip)


def _unchanged(result: Result, track: Track, policy: ClipPolicy) -> Result:
    """Return a result if neither the track nor the rule has changed since the race; raise `UserError` otherwise."""
    result.check(track)
    if rule_hash(type(policy)) != result.rule_hash:
        raise UserError(f"{result.rule}: the code of the rule has changed since this result was made; race the rule again")
    return result


def refuse_broken_laws(policy: ClipPolicy) -> None:
    """Raise `UserError` if a rule breaks a law that it has not opted out of."""
    if broken := [outcome.law for outcome in check(policy) if outcome.status == "fail"]:
        raise UserError(f"{policy.name} breaks the law {broken[0]}; see `rlzoo clips check`")
