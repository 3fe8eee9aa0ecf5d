"""Working time over several sessions."""

import json
from pathlib import Path
from unittest import mock

import pytest

from attention_priors.lab import machine
from attention_priors.lab.machine import WallClock


class Time:
    """Clock that a test sets."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture(autouse=True)
def _its_clock(time: Time):
    with mock.patch.object(machine, "time", time):
        yield


def test_sessions_add_up(tmp_path: Path, time: Time):
    path = tmp_path / "seconds.json"
    with WallClock(path) as first:
        time.now += 30
        assert first.seconds == 30
    time.now += 1000

    def interrupted() -> None:
        with WallClock(path):
            time.now += 5
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    time.now += 1000
    with WallClock(path) as third:
        time.now += 2
        assert third.seconds == 37
        third.forget()
    assert not path.exists()


def test_killed_sessions_lose_little_time(tmp_path: Path, time: Time):
    path = tmp_path / "seconds.json"
    with WallClock(path) as killed:
        for _ in range(25):
            time.now += 1
            killed.tick()
        # The time in the file, in case the session is killed.
        assert json.loads(path.read_text()) == 20
        with WallClock(path) as again:
            assert again.seconds == 20


def test_idle_time_is_not_counted(tmp_path: Path, time: Time):
    path = tmp_path / "seconds.json"
    with WallClock(path) as first:
        time.now += 30
    time.now += 1000
    assert first.seconds == WallClock(path).seconds == json.loads(path.read_text()) == 30


def test_concurrent_sessions_all_count(tmp_path: Path, time: Time):
    path = tmp_path / "seconds.json"
    with WallClock(path, shared=True) as first, WallClock(path, shared=True) as second:
        time.now += 12
        first.tick()
        second.tick()
        time.now += 3
        assert first.seconds == 15
    assert WallClock(path).seconds == json.loads(path.read_text()) == 30


def test_without_a_file_one_session_counts(tmp_path: Path, time: Time):
    with WallClock(None) as clock:
        time.now += 20
        clock.tick()
        assert clock.seconds == 20
    assert not any(tmp_path.iterdir())
