"""The bench can time the parts of a step, which it finds by name."""

from examples.bench.overhead import timed


def test_every_timed_function_exists():
    for share, places in timed().items():
        for owner, name in places:
            assert callable(getattr(owner, name)), f"{share}: {owner.__name__} has no {name}"
