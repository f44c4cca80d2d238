"""The workflows: only the job that publishes may request a token."""

from pathlib import Path

import yaml

FOLDER = Path(__file__).resolve().parents[1] / ".github" / "workflows"
WORKFLOWS = {file.stem: yaml.safe_load(file.read_text()) for file in FOLDER.glob("*.yml")}


def test_only_the_job_that_publishes_gets_a_token():
    granted = {}
    for name, workflow in WORKFLOWS.items():
        assert workflow["permissions"] == {"contents": "read"}
        granted |= {(name, job): steps["permissions"] for job, steps in workflow["jobs"].items() if "permissions" in steps}
    assert granted == {("publish", "publish"): {"id-token": "write"}}
    publishing = WORKFLOWS["publish"]["jobs"]["publish"]
    assert publishing["environment"]["name"] == "pypi"
    assert not any("run" in step for step in publishing["steps"])  # no code of the repository runs in the job with the token
    assert WORKFLOWS["publish"][True] == {"push": {"tags": ["v[0-9]*"]}}  # YAML 1.1 reads the key `on` as true
