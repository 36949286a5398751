"""Fixture `clock`, a fake clock for tests of codec.advise."""

from types import SimpleNamespace

import pytest

from codec.advisor import advise


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock: each measured call takes the duration that the test sets, initially near 0.1 ms."""
    now = SimpleNamespace(seconds=0.0, step=2.0**-13)

    def tick():
        now.seconds += now.step
        return now.seconds

    monkeypatch.setattr(advise, "time", SimpleNamespace(perf_counter=tick))
    return now
