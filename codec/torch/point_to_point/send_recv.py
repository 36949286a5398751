"""Point-to-point messages: frames, or any bytes, from one rank to another."""

import threading
import time
from collections.abc import Callable
from typing import Any

from codec import ArgumentError, CallOptions, PeerError
from codec._options import settings_of
from codec.arguments import check_timeout, shown, whole
from codec.torch.group.communicator import warn_non_member
from codec.torch.group.levels import all_ranks
from codec.torch.group.work import Work
from codec.torch.group.worker import Worker
from codec.torch.network.endpoint import Endpoint, endpoint_of, use_security
from codec.torch.network.sockets import ConnectionInfo
from codec.torch.network.tcp import PeerConnection

DEFAULT_MAX_NBYTES = 1 << 30
_MOST_NBYTES = 1 << 36  # maximum bytes of a message


def send(
    data: Any, dst: int, *, group: Any = None, tag: int = 0, async_op: bool = False, options: CallOptions | None = None
) -> Work | None:
    """Send a frame, or any bytes, to one rank, which receives them with :func:`recv`.

    Messages between two ranks with the same tag arrive in the order of sending. Messages in different directions, or
    with different tags, do not wait for each other. Sending a large message blocks until the receiver reads it. So two
    ranks that both send before they receive deadlock, unless they send with ``async_op=True``.

    Parameters
    ----------
    data : bytes or buffer
        Message, up to 64 GiB; it must not change until it is sent.
    dst : int
        Receiving rank of the group.
    group : ProcessGroup, optional
        Group of ranks. Default: all ranks.
    tag : int
        Tag of the message, 0 to 2^31 - 1. Each tag has a separate connection.
    async_op : bool
        True: return at once; the message is sent after the messages of earlier calls.
    options : CallOptions, optional
        ``codec.options(timeout=)``: longest wait for the connection, and then for the receiver to read each 4 MiB.
        Default: the timeout of the group. Other settings are ignored.

    Returns
    -------
    Work or None
        Work if `async_op`. Its :meth:`Work.wait` returns once the message was passed to the operating system, possibly
        before `dst` has received it.

    Raises
    ------
    ArgumentError
        An argument is invalid; nothing is sent.
    PeerError
        `dst` is lost or did not answer in time. If a part of the message was sent, the connection is closed, and later
        calls with this rank and tag raise PeerError, too. The same holds after KeyboardInterrupt.

    See Also
    --------
    recv : Receive a message.
    exchange : Send to all ranks at once.

    Examples
    --------
    >>> ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    >>> if ranks > 1 and rank == 0:
    ...     codec.torch.send(codec.encode(torch.ones(1000), codec.Quantize(4)), dst=1)
    >>> if rank == 1:
    ...     x = codec.decode(codec.torch.recv(src=0, max_nbytes=1 << 16))
    """
    try:
        buffer = memoryview(data).cast("B")
    except (TypeError, ValueError, BufferError) as e:
        raise ArgumentError(f"data must be bytes or a contiguous buffer, got {shown(data)}: {e}") from None
    if buffer.nbytes > _MOST_NBYTES:
        raise ArgumentError(f"data has {buffer.nbytes} bytes; the maximum is {_MOST_NBYTES}")
    route = _route("send", "dst", dst, group, tag, options)
    if route is None:
        return None
    return route.pair.senders.run(lambda: route.pair.send(buffer, route.seconds), async_op=async_op)


def recv(
    src: int,
    *,
    group: Any = None,
    tag: int = 0,
    max_nbytes: int = DEFAULT_MAX_NBYTES,
    async_op: bool = False,
    options: CallOptions | None = None,
) -> Any:
    """Receive a message that one rank has sent with :func:`send`.

    Memory is allocated only as bytes arrive, so a sender that announces a large size cannot exhaust it.

    Parameters
    ----------
    src : int
        Sending rank of the group.
    group : ProcessGroup, optional
        Group of ranks. Default: all ranks.
    tag : int
        Tag of the message, 0 to 2^31 - 1.
    max_nbytes : int
        Maximum size of the message in bytes, 1 GiB by default. For a frame, pass ``codec.bound(shape, dtype, spec)``.
    async_op : bool
        True: return at once; calls receive messages in the order of the calls.
    options : CallOptions, optional
        ``codec.options(timeout=)``: longest wait for the start of the message, and then for each 4 MiB of it. Default:
        the timeout of the group. Other settings are ignored.

    Returns
    -------
    bytes or Work
        The message; or, if `async_op`, a Work whose :meth:`Work.result` returns the message.

    Raises
    ------
    ArgumentError
        An argument is invalid.
    PeerError
        `src` is lost. Or no message has started in time; the call can then be repeated. Or the message is longer than
        `max_nbytes`; it can then be received with a larger limit. An error in the middle of a message, or
        KeyboardInterrupt, closes the connection, so that later calls with this rank and tag raise PeerError, too.

    Examples
    --------
    >>> ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    >>> if ranks > 1 and rank < 2:  # both directions at once
    ...     sending = codec.torch.send(b"x" * 10_000_000, dst=1 - rank, async_op=True)
    ...     received = codec.torch.recv(src=1 - rank)
    ...     sending.wait()
    """
    max_nbytes = whole("max_nbytes", max_nbytes, 0, _MOST_NBYTES)
    route = _route("recv", "src", src, group, tag, options)
    if route is None:
        return None
    return route.pair.receivers.run(lambda: route.pair.receive(max_nbytes, route.seconds), async_op=async_op)


class PeerLink:
    """Connection to one rank for one tag. Sends run in the background, in order; so do receives.

    Parameters
    ----------
    peer : int
        Rank of the other process in the group.
    group : ProcessGroup or None
        Group of both ranks.
    tag : int
        As for :func:`send`.
    options : CallOptions or None
        As for :func:`send`.

    Raises
    ------
    ArgumentError, PeerError
        As for :func:`send`; or this rank is not in the group.
    """

    def __init__(self, peer: int, group: Any, tag: int, options: CallOptions | None) -> None:
        route = _route("Link", "peer", peer, group, tag, options)
        if route is None:
            raise ArgumentError("this rank is not in the group: call this function only on ranks of the group")
        self._pair, self._seconds = route.pair, route.seconds

    def send(self, data: bytes) -> Work:
        """Send a message after the messages of earlier calls."""
        pair, seconds, buffer = self._pair, self._seconds, memoryview(data)
        return pair.senders.run(lambda: pair.send(buffer, seconds), async_op=True)

    def receive(self, max_nbytes: int) -> Work:
        """Receive the next message after those of earlier calls; the message is the result of the Work."""
        pair, seconds = self._pair, self._seconds
        return pair.receivers.run(lambda: pair.receive(max_nbytes, seconds), async_op=True)

    def info(self) -> ConnectionInfo:
        """Return the kernel's statistics of the connection."""
        return self._pair.info()

    def close(self) -> None:
        """Make calls in flight and later ones raise PeerError, here and at the peer."""
        self._pair.close()


class _Calls:
    """Runs the calls of one direction in order. After the first asynchronous call, a worker thread runs all calls.

    Parameters
    ----------
    name : str
        Name of the thread.
    close : callable
        Closes the connection.
    """

    def __init__(self, name: str, close: Callable[[], None]) -> None:
        self._name, self._close = name, close
        self._lock = threading.Lock()
        self._worker: Worker | None = None

    def run(self, call: Callable[[], Any], *, async_op: bool) -> Any:
        """Run a call after all earlier ones. Return its result, or its Work if `async_op`."""
        with self._lock:
            if async_op and self._worker is None:
                self._worker = Worker(self._name)
                self._worker.end_with(self)
            worker = self._worker
        if worker is None:
            return call()
        work = worker.submit(call)
        if async_op:
            return work
        try:
            return work.result()
        except BaseException:
            if not work.is_completed():  # interrupted: if the receive stayed queued, it would consume the next message
                self._close()
            raise

    def end(self) -> None:
        """Make calls in flight fail, after the connection was closed, and end the thread."""
        with self._lock:
            worker = self._worker
        if worker is not None:
            worker.close()


class _Pair:
    """Connection between this rank and another rank for one tag; the first call connects.

    Parameters
    ----------
    endpoint : Endpoint
        Endpoint of this rank.
    peer, tag : int
        Rank of the peer, and the tag.
    """

    def __init__(self, endpoint: Endpoint, peer: int, tag: int) -> None:
        self._endpoint, self._peer, self._tag = endpoint, peer, tag
        self._lock = threading.Lock()
        self._connection: PeerConnection | None = None
        self._closed = False
        name = f"codec, rank {endpoint.rank}, {{}} {peer}"
        self.senders = _Calls(name.format("to"), self.close)
        self.receivers = _Calls(name.format("from"), self.close)

    def send(self, data: memoryview, seconds: float) -> None:
        """Send a message."""
        self._connected(seconds).send([data], seconds)

    def receive(self, max_nbytes: int, seconds: float) -> bytes:
        """Return the next message."""
        return self._connected(seconds).receive(max_nbytes, seconds).tobytes()

    def info(self) -> ConnectionInfo:
        """Return the kernel's statistics of the connection; zeros before it is connected."""
        return ConnectionInfo() if self._connection is None else self._connection.info()

    def close(self) -> None:
        """Make calls in flight and later ones raise PeerError."""
        self._closed = True
        if self._connection is not None:
            self._connection.close()
        self._endpoint.wake()

    def end(self) -> None:
        """Close the connection, as :meth:`close` does, and end the threads; :meth:`Endpoint.close` calls this."""
        self.close()
        self.senders.end()
        self.receivers.end()

    def _connected(self, seconds: float) -> PeerConnection:
        """Return the connection; if there is none, connect: the higher rank connects to the lower rank."""
        deadline = time.monotonic() + seconds
        self._endpoint.check_process()
        if not self._lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            raise PeerError(f"rank {self._peer} has not connected within the timeout")
        try:
            if self._connection is None and not self._closed:
                left = max(0.001, deadline - time.monotonic())
                if self._endpoint.rank > self._peer:
                    self._connection = self._endpoint.connect([self._peer], self._tag, left)[0]
                else:
                    self._connection = self._endpoint.accept(self._peer, self._tag, left, lambda: self._closed)
            if self._connection is None or self._closed:
                raise PeerError(f"the connection with rank {self._peer} is closed: make a new group")
            return self._connection
        finally:
            self._lock.release()


class _Route:
    """Connection for a call, and the timeout of the call in seconds."""

    def __init__(self, pair: _Pair, seconds: float) -> None:
        self.pair, self.seconds = pair, seconds


def _route(call: str, name: str, peer: Any, group: Any, tag: Any, options: CallOptions | None) -> _Route | None:
    """Check the arguments of a call, and return its route; None if this rank is not in the group."""
    settings = settings_of(options)
    timeout = check_timeout(settings.timeout)
    tag = whole("tag", tag, 0, (1 << 31) - 1)
    key = all_ranks(group)
    if warn_non_member(key, call):
        return None
    use_security(key, settings.security)
    endpoint = endpoint_of(key, None if timeout is None else timeout.total_seconds())
    peer = whole(name, peer, 0, endpoint.size - 1)
    if peer == endpoint.rank:
        raise ArgumentError(f"{name} must be another rank of the group, got this rank, {peer}")
    with endpoint.lock:
        pair = endpoint.pairs.get((peer, tag))
        if pair is None:
            pair = endpoint.pairs[peer, tag] = _Pair(endpoint, peer, tag)
    return _Route(pair, (timeout or endpoint.timeout).total_seconds())
