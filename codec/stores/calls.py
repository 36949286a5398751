"""Calls of a store: a limit on their time, repetitions of those that fail, and errors without credentials."""

import importlib
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar, cast

from codec.arguments import shown
from codec.errors import CodecError, PeerError

T = TypeVar("T")

_TRIES = 5
_PAUSE = 0.05  # seconds before the first repetition; each further one waits twice as long
_MOST_SHOWN = 300  # characters of an error of a store
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, TypeError, ImportError)
_SECRET_NAME = re.compile(r"key|secret|token|passw|sas|connection_string|credential|signature", re.IGNORECASE)
_SHORTEST_SECRET = 6  # characters; shorter values occur in other words
_NAMED = r"\w*(?:key|secret|token|sig|signature|credential|password|passwd)"
_PATTERNS = [
    (re.compile(r"(\w://)[^\s/@]*@"), r"\1***@"),  # user and password of a URL
    (re.compile(r"(\w://[^\s?#'\"]*)[?#][^\s'\"]*"), r"\1?***"),  # query of a URL, which signs it
    (re.compile(rf"\b({_NAMED})(\s*=\s*|[\"']\s*:\s*[\"']?)[^\s&;,)}}]+", re.IGNORECASE), r"\1\2***"),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b"), "***"),
]


def started(call: Callable[[], T]) -> "Future[T]":
    """Run a call in a new thread, which does not delay the end of the process."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as e:
            done.set_exception(e)

    threading.Thread(target=run, name="codec, store", daemon=True).start()
    return done


def within(seconds: float, call: Callable[[], T], host: str = "the host of the process group's key-value store") -> T:
    """Run a call that uses a store in a new thread, and return its result; abandon the thread after `seconds`.

    Some stores have no timeout for answers of their host, so a frozen host would block this process forever. `host`
    names what does not answer.

    Raises
    ------
    PeerError
        The call has not returned in time. Its thread ends when the host answers, or breaks the connection.
    """
    answer = started(call)
    try:
        return answer.result(seconds)
    except TimeoutError:
        if answer.done():  # the call itself has raised it
            raise
        raise PeerError(f"{host} does not answer within {seconds:g} s") from None


def pause(attempt: int) -> float:
    """Return the seconds to wait after failed attempt number `attempt`, counted from 0.

    They are random, so that the clients of a busy store do not all return at once.
    """
    return _PAUSE * 2**attempt * random.uniform(0.5, 1)


def repeated(what: str, call: Callable[[], T], seconds: float) -> T:
    """Call a store; repeat a call that fails, unless a repetition would fail, too.

    Parameters
    ----------
    what : str
        Purpose of the call, for errors.
    call : callable
        The call.
    seconds : float
        Seconds within which the store must answer, with all repetitions.

    Raises
    ------
    PeerError
        The call has failed several times, or the store does not answer.
    """
    deadline = time.monotonic() + seconds
    for attempt in range(_TRIES):
        try:
            return within(max(0.01, round(deadline - time.monotonic(), 3)), call, "the store")
        except CodecError:
            raise
        except Exception as e:
            why, final = redacted(e), isinstance(e, _FINAL)
        wait = pause(attempt)
        if final or attempt == _TRIES - 1 or time.monotonic() + wait > deadline:
            raise PeerError(f"the store cannot {what}: {why}")  # without a cause, which may hold credentials
        time.sleep(wait)
    raise AssertionError


class Creating(Protocol):
    """Store that creates objects conditionally."""

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one of this name; return True if it was written."""
        ...

    def delete(self, names: list[str]) -> None:
        """Delete objects."""
        ...


def creates_once(store: Creating, name: str) -> bool:
    """Return False if a store creates an object a second time, as those that ignore the condition do.

    Parameters
    ----------
    store : Creating
        The store.
    name : str
        Name of the object, which is deleted. A killed process may have left it.
    """
    created = [store.create(name, b"1") for _ in range(2)]
    store.delete([name])
    return not created[1]


def redacted(error: BaseException) -> str:
    """Return the type and the text of a store's error in one line, without what may be a credential."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    for secret in sorted(set(_secrets()), key=len, reverse=True):
        text = text.replace(secret, "***")
    for pattern, instead in _PATTERNS:
        text = pattern.sub(instead, text)
    text = text if text.isprintable() else shown(text)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _secrets() -> Iterator[str]:
    """Yield values of environment variables, and of settings of fsspec, whose names are those of credentials."""
    yield from _values(os.environ)
    if "fsspec.config" in sys.modules:
        yield from _values(cast(Any, importlib.import_module("fsspec.config")).conf)


def _values(given: Mapping[str, Any]) -> Iterator[str]:
    for name, value in list(given.items()):
        if isinstance(value, Mapping):
            yield from _values(cast("Mapping[str, Any]", value))
        elif isinstance(value, str) and len(value) >= _SHORTEST_SECRET and _SECRET_NAME.search(name):
            yield value
