"""codec.options sets options of one call or of a context; no option changes a byte of a frame."""

import threading
from datetime import timedelta

import numpy as np
import pytest

import codec
from codec._options import settings_of
from codec.encoding import encode_request

X = np.linspace(-1, 1, 5000, dtype=np.float32)


def active():
    return settings_of(None)


def test_inner_contexts_override_field_by_field():
    assert active() == codec.options()
    with codec.options(engine="native", threads=4, verify_first=False, timeout=30.0) as outer:
        assert active() == outer
        with codec.options(threads=1, verify_first=True, algorithm="ring"):
            assert active() == codec.options("native", 1, True, "ring", 30.0)
        assert active() == outer
    assert active() == codec.options()


def test_options_of_a_call_override_those_of_its_context():
    with codec.options(engine="numba", threads=4):
        assert settings_of(codec.options(threads=2)) == codec.options(engine="numba", threads=2)
        assert settings_of(None).threads == 4


def test_settings_reach_requests():
    request = encode_request(X, codec.Lossless(), codec.options(threads=3, verify_first=False))
    assert (request.threads, request.verify_first) == (3, False)
    request = encode_request(X, codec.Lossless(), codec.options())
    assert (request.threads, request.verify_first) == (None, True)


def test_context_ends_with_an_exception():
    options = codec.options(threads=2)
    with pytest.raises(KeyError), options:
        raise KeyError
    assert active() == codec.options()


def test_one_object_can_be_entered_again_and_in_other_threads():
    options, seen = codec.options(threads=2), []
    with options, options:
        thread = threading.Thread(target=lambda: seen.append(active()))
        thread.start()
        thread.join()
        assert active() == options
    assert seen == [codec.options()]  # a new thread has the default options
    assert active() == codec.options()


def test_frames_do_not_depend_on_options():
    frame = codec.encode(X, "small")
    with codec.options(engine="native", threads=3):
        assert codec.encode(X, "small") == frame
        assert codec.encode_many([X, X[:700]], "small", options=codec.options(threads=1))[0] == frame
        assert (
            codec.decode(frame) == codec.decode(frame, options=codec.CallOptions(threads=1, nontemporal=True))
        ).all()


def test_timeout_is_seconds_or_a_timedelta():
    assert codec.options(timeout=30).timeout == codec.options(timeout=timedelta(seconds=30)).timeout
    assert codec.options(timeout=0.001).timeout == timedelta(milliseconds=1)
    assert codec.options(timeout=timedelta(days=3653)).timeout == timedelta(days=3653)
    assert codec.options().timeout is None
    for wrong in (-5, 0, 1e-9, 1e12, float("nan"), float("inf"), "5", True, [1], X, timedelta(0), timedelta.max):
        with pytest.raises(codec.ArgumentError, match="timeout must be seconds or a timedelta, from 1 ms to 10 years"):
            codec.options(timeout=wrong)


def test_algorithm_is_a_name_of_one():
    for name in ("auto", "two_shot", "all_gather", "ring", "raw", "shared_scale"):
        assert codec.options(algorithm=name).algorithm == name
    for wrong in ("tow_shot", "", 5, [], X):
        with pytest.raises(codec.ArgumentError, match="algorithm must be one of auto, two_shot, all_gather, ring, raw"):
            codec.options(algorithm=wrong)


def test_largest_norm_is_a_finite_number_above_0():
    assert codec.options(max_norm=np.float32(2)).max_norm == 2.0
    assert codec.options().max_norm is None
    for wrong in (0, -1.0, float("nan"), float("inf"), True, "1", X):
        with pytest.raises(codec.ArgumentError, match="max_norm must be a finite number above 0, got"):
            codec.options(max_norm=wrong)


def test_wrong_options_are_rejected():
    for wrong in ({"threads": 0}, {"threads": 1.5}, {"verify_first": X}):
        with pytest.raises(codec.ArgumentError, match="must be"):
            codec.options(**wrong)
    with pytest.raises(codec.EngineError, match="engine must be one of native, numba, cuda, got 'gpu'"):
        codec.options(engine="gpu")
    for wrong in (4, "native", {"threads": 4}):
        with pytest.raises(codec.ArgumentError, match=r"options must be made by codec.options\(...\), got"):
            codec.encode(X, options=wrong)
    with pytest.raises(AttributeError):
        codec.options().threads = 4
