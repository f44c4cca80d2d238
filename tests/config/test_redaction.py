"""No secret appears in what is written, sent or printed; everything else is unchanged."""

import doctest
import logging
import time

import pytest

import rlzoo.config.redaction
from rlzoo.config.redaction import (
    REDACTED,
    RedactingFilter,
    environment_secrets,
    redact,
    redact_settings,
    redacted_keys,
    with_secrets_of,
    without_userinfo,
)

ADDRESSES = {
    "http://me:pass word": "http://me:pass word",  # an address ends at a space
    "http://me:hunter2@host:5000/x": f"http://{REDACTED}@host:5000/x",
    "http://hunter2@host": f"http://{REDACTED}@host",
    "postgresql+psycopg2://me:hun/ter2@host/db": f"postgresql+psycopg2://{REDACTED}@host/db",
    "https://me:hunt@er2@host/db": f"https://{REDACTED}@host/db",
    "mysql://me:@host": f"mysql://{REDACTED}@host",
    "told 'http://a:hunter2@b', not 'http://c:hunter2@d'": f"told 'http://{REDACTED}@b', not 'http://{REDACTED}@d'",
    "sqlite:////home/me@home/mlflow.db": "sqlite:////home/me@home/mlflow.db",
    "http://127.0.0.1:8000": "http://127.0.0.1:8000",
    "me@host and git@github.com:a/b.git": "me@host and git@github.com:a/b.git",
}
SHAPES = [
    "hf_AbCdEfGhIjKlMnOpQrStUvWxYz", "sk-proj-abcdefghijklmnop_qrst", "ghp_abcdefghijklmnopqrstuvwxyz012345",
    "github_pat_11ABCDEFG0abcdefghijkl", "glpat-abcdefghijklmnopqrst",
]  # fmt: skip
HARMLESS = [
    "learner.max_tokens_per_micro_batch=512", "correction.pool='token'", "task-specific-settings-of-this-run", "a token: 5",
    "clip.secretive=1", "reduction=token_mean", "risk-averse-and-slow-learning-rate", "step 3/40 reward 0.637", "half_hf_a",
    "basic training", "password", "tokens=3", "pass@k=0.5", "eos_token_id=2", "max_tokens=512", "pad_token=0", "{'pass': 3}",
    "{'reduction': 'token_mean'}", "passed=yes", "bypass=all", "compass=north", "num_pass=3",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_secrets(monkeypatch):
    """Hide the environment secrets of the user who runs the tests."""
    for name, value in dict(rlzoo.config.redaction.os.environ).items():
        if value in environment_secrets():
            monkeypatch.delenv(name)


def test_the_doctest_examples_pass():
    assert doctest.testmod(rlzoo.config.redaction).failed == 0


@pytest.mark.parametrize("address", ADDRESSES)
def test_user_and_password_are_removed_from_an_address(address):
    assert redact(address) == ADDRESSES[address]
    assert redact(redact(address)) == redact(address)
    assert without_userinfo(address) == ADDRESSES[address].replace(f"{REDACTED}@", "")


@pytest.mark.parametrize("token", SHAPES)
def test_a_token_is_recognised_by_its_format(token):
    assert redact(f"told ({token}): no") == f"told ({REDACTED}): no"


@pytest.mark.parametrize("text", HARMLESS)
def test_text_without_secrets_is_unchanged(text):
    assert redact(text) == text


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("clip.api_key='a b': too short", f"clip.api_key={REDACTED}: too short"),
        ("--set judge.token=abc, and", f"--set judge.token={REDACTED}, and"),
        ("host/db?user=me&password=abc&ssl=1", f"host/db?user=me&password={REDACTED}&ssl=1"),
        ("Authorization: Bearer abc.def-ghi", f"Authorization: Bearer {REDACTED}"),
        ("PGPASSWORD=abc psql", f"PGPASSWORD={REDACTED} psql"),
        ("MYSQL_PWD=abc DB_PASS=abc", f"MYSQL_PWD={REDACTED} DB_PASS={REDACTED}"),
        ("postgresql://host/db?user=me&sslpassword=abc", f"postgresql://host/db?user=me&sslpassword={REDACTED}"),
        ("host=db user=me password=abc", f"host=db user=me password={REDACTED}"),
        ("input_value={'apiKey': 'a b', 'width': 1}", f"input_value={{'apiKey': {REDACTED}, 'width': 1}}"),
        ('{"token_secret": "abc"}', f'{{"token_secret": {REDACTED}}}'),
    ],
)
def test_a_secret_value_is_recognised_by_its_name(text, rest):
    assert redact(text) == rest


def test_secret_settings_are_redacted_at_any_depth():
    settings = {
        "judge": {"api_key": "abc", "auth_token": "", "url": "http://a:b@c", "HF_TOKEN": "x", "credentials": {"user": "me"}},
        "task": {"reward": {"tokenSecret": "x", "db_pass": "x", "PGPASSWORD": "x", "eos_token_id": 2, "num_pass": 3}},
        "tokens": ["ghp_abcdefghijklmnopqrstuvwxyz012345", "fine"],
        "max_new_tokens": 64,
        "pad_token": None,
        "secret": 5,
        "per_token": 5,
        "api_token": "12345678",
        "pool": "token",
    }
    expected = {
        "judge": {
            "api_key": REDACTED, "auth_token": "", "url": f"http://{REDACTED}@c", "HF_TOKEN": REDACTED,
            "credentials": {"user": REDACTED},
        },
        "task": {
            "reward": {
                "tokenSecret": REDACTED, "db_pass": REDACTED, "PGPASSWORD": REDACTED, "eos_token_id": 2, "num_pass": 3,
            }
        },
        "tokens": [REDACTED, "fine"],
        "max_new_tokens": 64,
        "pad_token": None,
        "secret": REDACTED,
        "per_token": 5,
        "api_token": REDACTED,
        "pool": "token",
    }  # fmt: skip
    assert redact_settings(settings) == expected
    assert settings["judge"]["api_key"] == "abc", "the settings themselves stay"
    assert [*redacted_keys(expected)] == [
        "judge.api_key", "judge.url", "judge.HF_TOKEN", "judge.credentials.user", "task.reward.tokenSecret",
        "task.reward.db_pass", "task.reward.PGPASSWORD", "tokens", "secret", "api_token",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "planted-value"),
        ("MLFLOW_TRACKING_PASSWORD", "planted-value"),
        ("MLFLOW_TRACKING_TOKEN", "planted-value"),
        ("ANY_API_KEY", "planted-value"),
        ("AWS_SECRET_ACCESS_KEY", "planted-value"),
        ("PGPASSWORD", "planted-value"),
        ("MYSQL_PWD", "planted-value"),
        ("SMTP_PASS", "planted-value"),
        ("KEYSTORE_PASSWORD_2", "planted-value"),
        ("SOME_DATABASE", "postgresql://me:planted-value@host/db"),
        ("SOME_PROXY", "http://me:planted%2Dvalue@host"),
    ],
    ids=lambda text: text if text.isupper() else "",  # pytest puts ids into the environment
)
def test_a_secret_from_the_environment_is_redacted_anywhere(monkeypatch, name, value):
    assert "planted-value" in redact("x planted-value y")
    monkeypatch.setenv(name, value)
    assert redact("x planted-value y") == f"x {REDACTED} y"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "short"),
        ("TOKENIZERS_PARALLELISM", "planted-value"),
        ("PWD", "/home/planted"),
        ("OLDPWD", "/home/planted"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/home/planted"),
        ("SSH_AUTH_SOCK", "/run/planted"),
    ],
)
def test_short_or_otherwise_named_variables_are_not_secrets(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert redact(f"x {value} y") == f"x {value} y"


@pytest.mark.parametrize("unit", ["x", "x.", "a://b:", "a://", "k='", "Bearer ", "password", "a_1"])
def test_redaction_takes_linear_time(monkeypatch, unit):
    text = unit * (60_000 // len(unit))
    monkeypatch.setenv("LONG", text)
    began = time.process_time()
    redact(text)
    redact_settings({"key": text, text: 1})
    without_userinfo(text)
    assert time.process_time() - began < 2, "quadratic time would be 20 seconds"


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("a://b:c and http://me:hunter2@host", f"a://b:c and http://{REDACTED}@host"),
        ("a://b:c://me:hunter2@host", f"a://{REDACTED}@host"),
    ],
)
def test_a_partial_match_does_not_hide_a_later_secret(text, rest):
    assert redact(text) == rest


def test_the_longer_of_two_overlapping_secrets_is_redacted_first(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "abcdef")
    monkeypatch.setenv("B_TOKEN", "abcdefghi")
    assert redact("abcdefghi") == REDACTED


def test_redacted_settings_are_restored_from_the_given_ones():
    given = {"width": 1, "judge": {"api_key": "abc", "url": "http://a:b@c"}, "keys": ["k"]}
    written = redact_settings(given | {"width": 2, "keys": ["ghp_abcdefghijklmnopqrstuvwxyz012345"]})
    assert with_secrets_of(given, written) == given | {"width": 2}
    assert with_secrets_of({}, {"api_key": REDACTED}) == {"api_key": REDACTED}


def test_the_log_contains_no_secret(caplog):
    logger = logging.getLogger("rlzoo")
    assert any(isinstance(item, RedactingFilter) for item in logger.filters)
    with caplog.at_level(logging.INFO, logger="rlzoo"):
        logger.info("looking at %s", "http://me:hunter2@host")
        try:
            raise ValueError("http://me:hunter2@host is down")
        except ValueError:
            logger.exception("%d failed", 1)
    assert "hunter2" not in caplog.text
    assert f"looking at http://{REDACTED}@host" in caplog.text
    assert f"ValueError: http://{REDACTED}@host is down" in caplog.text
