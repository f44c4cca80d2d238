"""Attacks on runs, one per line; the laws that hold after each are in `tests.faults.harness`."""

import os

import pytest

from tests.faults.attacks import ATTACKS
from tests.faults.harness import Range

pytestmark = pytest.mark.long

EVERYTHING = int(os.environ.get("RLZOO_KILLS", "2")) > 5


@pytest.fixture(scope="module")
def attacked(tmp_path_factory, zygote):
    return Range(tmp_path_factory.mktemp("attacks"), zygote)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if EVERYTHING or attack.quick], ids=lambda attack: attack.name)
def test_an_attack_loses_no_data(attacked, attack):
    attacked.judge(attack)


def test_attacks_have_different_names():
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 100
