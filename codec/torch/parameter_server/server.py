"""Parameter server, which receives frames of gradients from workers, and sends them reductions."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

import codec
from codec import CallOptions, CodecError, PeerError, SpecError
from codec._options import settings_of
from codec.arguments import check_timeout, truth, whole
from codec.readable import Rounded, count, size
from codec.specs import Spec
from codec.torch import _compat
from codec.torch.network.endpoint import Endpoint
from codec.torch.network.tcp import PeerConnection
from codec.torch.network.waits import WAKE_SECONDS
from codec.torch.parameter_server import messages, sums
from codec.torch.parameter_server.arguments import check_ranks, endpoint_for
from codec.torch.parameter_server.means import LOSSLESS, MeanEncoder, spec_in
from codec.torch.parameter_server.messages import ABANDON, CLOSE, FLOATS, INIT, PUSH, REDUCES, TAG, Key, Request
from codec.torch.parameter_server.steps import KeyFrames, ServerSteps
from codec.torch.parameter_server.table import Table
from codec.torch.transport.messages import Array
from codec.torch.transport.values import check_norm, norm_of

logger = logging.getLogger("codec.torch")


@dataclass(frozen=True, repr=False)
class ServerStats(Rounded):
    """Totals of a parameter server, which :meth:`ParameterServer.stats` returns.

    Attributes
    ----------
    keys : int
        Number of keys that users have registered.
    steps : int
        Number of steps that have ended.
    steps_in_flight : int
        Number of steps that have begun and not ended.
    in_flight_nbytes : int
        Bytes of pushed frames that the server holds.
    requests, refused : int
        Number of requests answered, and number of those that were answered by an error.
    received_nbytes, sent_nbytes : int
        Bytes of all messages from and to all workers, including headers.
    lost_workers : dict of int to str
        Ranks of workers whose connection broke, each with the reason.
    """

    keys: int
    steps: int
    steps_in_flight: int
    in_flight_nbytes: int
    requests: int
    refused: int
    received_nbytes: int
    sent_nbytes: int
    lost_workers: dict[int, str]

    def __str__(self) -> str:
        """Return one line with the numbers of steps, keys and requests, and the bytes."""
        lost = f", lost workers {', '.join(map(str, self.lost_workers))}" if self.lost_workers else ""
        return (
            f"{count(self.steps, 'step')}, {self.steps_in_flight} in flight ({size(self.in_flight_nbytes)}), of "
            f"{count(self.keys, 'key')}: {count(self.requests, 'request')}, {self.refused} refused, "
            f"{size(self.received_nbytes)} received, {size(self.sent_nbytes)} sent{lost}"
        )


class ParameterServer:
    """One of the servers to which workers push gradients, and from which they pull the mean.

    Provisional: may change in any version.

    Each rank of the group is either a server or a worker. Each server holds a share of the keys. It stores the pushed
    frames, and reduces them when the first worker pulls. It holds no parameters: each worker updates its own copy.

    Lost workers do not stop the others: steps that begin later continue without them. An invalid request raises an
    error only on the worker that sent it, and changes nothing.

    Parameters
    ----------
    servers, workers : sequence of int
        Ranks of the servers and of the workers. The order of `servers` must be the same on all ranks.
    group : ProcessGroup, optional
        Group of all servers and workers. Default: all ranks.
    max_keys : int
        Maximum number of keys that can be registered on this server.
    max_key_nbytes : int
        Maximum size in bytes of the uncompressed tensor of one key; 1 GiB by default.
    max_steps : int
        Maximum number of steps in which a worker can take part at once, 1 or more. This limits memory: from each
        worker, the server holds at most this many frames per key.
    feedback : bool
        Error feedback for means that workers pull with a lossy spec: the server adds the residual of a key, the errors
        of the means that it has sent, to the next mean. Residuals need 4 bytes per value. Specs that are not
        contractions (:attr:`codec.Spec.contraction`), such as :class:`codec.Ternary`, are used without feedback.
    options : CallOptions, optional
        ``codec.options(timeout=)``: longest time that a pull waits for workers. Use the same timeout on servers and
        workers. Default: the timeout of the group. ``max_norm=``: largest norm of a frame that a worker pushes; pulls
        of a key with a larger one are a FrameError for all workers.

    Raises
    ------
    ArgumentError
        An argument is wrong, or this rank is no server.
    PeerError
        This rank cannot open a port.

    See Also
    --------
    ParameterClient : The client that workers use.

    Examples
    --------
    >>> rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    >>> workers = list(range(1, ranks))
    >>> if ranks > 1 and rank == 0:
    ...     codec.torch.ParameterServer(servers=[0], workers=workers).serve()
    >>> if rank > 0:
    ...     with codec.torch.ParameterClient(servers=[0]) as client:
    ...         client.init({"weight": torch.zeros(100)})
    ...         mean = client.average(0, {"weight": torch.randn(100)}, codec.Ternary("base3"))
    """

    def __init__(
        self,
        servers: Sequence[int],
        workers: Sequence[int],
        *,
        group: Any = None,
        max_keys: int = 65_536,
        max_key_nbytes: int = 1 << 30,
        max_steps: int = 4,
        feedback: bool = True,
        options: CallOptions | None = None,
    ) -> None:
        settings = settings_of(options)
        timeout = check_timeout(settings.timeout)
        self._table = Table(
            whole("max_keys", max_keys, 1, (1 << 31) - 1), whole("max_key_nbytes", max_key_nbytes, 0, 1 << 36)
        )
        max_steps = whole("max_steps", max_steps, 1, 1 << 20)
        self._max_norm = settings.max_norm
        self._endpoint: Endpoint = endpoint_for(group, timeout, settings.security)
        self._workers = check_ranks("workers", workers, self._endpoint, other=servers)
        ranks = check_ranks("servers", servers, self._endpoint, member=True)
        self._means = MeanEncoder(ranks, self._endpoint.rank, feedback=truth("feedback", feedback))
        self._seconds = (timeout or self._endpoint.timeout).total_seconds()
        self._steps = ServerSteps(self._workers, max_steps)
        self._connections: dict[int, PeerConnection] = {}
        self._requests = self._refused = self._received = self._sent = 0  # guarded by `_steps.changed`
        self._finished = False

    def serve(self) -> None:
        """Serve the workers until all of them have closed their clients, or are lost.

        One thread serves each worker. KeyboardInterrupt closes all connections, so that the workers raise PeerError.

        Raises
        ------
        PeerError
            No worker is left, and none has closed its client: all were lost, or did not connect within the timeout.
        """
        if self._finished:
            raise codec.StateError("serve() has ended, and cannot be called again: create a new ParameterServer")
        threads = [
            threading.Thread(target=self._serve_worker, args=(w,), name=f"codec, worker {w}", daemon=True)
            for w in self._workers
        ]
        try:
            for thread in threads:
                thread.start()
            with self._steps.changed:
                while not self._all_gone():
                    self._steps.changed.wait(WAKE_SECONDS)
        finally:
            self._finished = True
            for connection in list(self._connections.values()):
                connection.close()
            self._endpoint.wake()
        for thread in threads:
            thread.join()
        if "closed" not in self._steps.state.values():
            reasons = "; ".join(f"worker {w} {reason}" for w, reason in self._steps.reasons.items())
            raise PeerError(f"no worker is left: {reasons or 'none has connected within the timeout'}")

    def stats(self) -> ServerStats:
        """Return the totals so far. Any thread may call this, even during :meth:`serve`."""
        with self._steps.changed:
            return ServerStats(
                len(self._table),
                self._steps.completed,
                self._steps.in_flight(),
                self._steps.nbytes(),
                self._requests,
                self._refused,
                self._received + sum(c.received_nbytes for c in self._connections.values()),
                self._sent + sum(c.sent_nbytes for c in self._connections.values()),
                dict(self._steps.reasons),
            )

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the residuals of this server's means. Any thread may call this.

        Call it after :meth:`serve`, or while no step is in flight. Otherwise the residuals of some keys may already
        include the next step.

        Returns
        -------
        dict
            Integers, strings and float32 tensors, which ``torch.load(weights_only=True)`` accepts.
        """
        return self._means.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the residuals by copies of those in a state of this server. Call this before :meth:`serve`.

        Parameters
        ----------
        state : mapping
            Return value of :meth:`state_dict` on this server, in a run with the same `servers`.

        Raises
        ------
        StateError
            `state` is no such state, or contains NaN or Inf. The residuals are unchanged.
        """
        self._means.load_state_dict(state)

    def _all_gone(self) -> bool:
        states = self._steps.state
        return all(
            state in ("lost", "closed") or (state == "absent" and w not in self._connections)
            for w, state in states.items()
        )

    def _serve_worker(self, worker: int) -> None:
        """Accept connections of a worker, which may reconnect, and answer its requests until the server ends."""
        seconds: float | None = self._seconds
        while not self._finished:
            try:
                connection = self._endpoint.accept(worker, TAG, seconds, lambda: self._finished)
            except PeerError as e:
                self._steps.leave(worker, "absent", f"is missing: {e}")
                seconds = None
                continue
            if connection is not None:
                with self._steps.changed:
                    self._connections[worker] = connection
                self._steps.join(worker)
                self._answer_all(worker, connection)
                seconds = None

    def _answer_all(self, worker: int, connection: PeerConnection) -> None:
        state, reason = "lost", "was lost"
        try:
            while state != "closed":
                message = connection.receive(self._table.request_limit(), self._seconds, idle=True)
                self._steps.join(worker)
                closing = self._answer(worker, connection, message)
                state, reason = ("closed", "has closed its client") if closing else (state, reason)
        except PeerError as e:
            reason = f"was lost ({e})"
            if not self._finished:
                logger.warning("parameter server, rank %d: worker %d %s", self._endpoint.rank, worker, reason)
        finally:
            connection.close()
            with self._steps.changed:
                del self._connections[worker]
                self._received += connection.received_nbytes
                self._sent += connection.sent_nbytes
            self._steps.leave(worker, state, reason)

    def _answer(self, worker: int, connection: PeerConnection, message: Array) -> bool:
        """Answer one request; return True if the worker has closed its client.

        Raises
        ------
        PeerError
            The worker is lost. Or the request failed for another reason than an error of the worker: other workers may
            have the values that this worker has requested, so that it must not take part in later steps.
        """
        taken: list[Any] = []
        request: Request | None = None
        failed: Exception | None = None
        refused = False
        try:
            try:
                request = messages.read_request(message)
                parts = self._perform(worker, request, taken, connection.check)
            except CodecError as e:
                connection.check()
                parts, refused = messages.error_reply(e), True
            except Exception as e:  # a bug, or a lack of memory, must not end the server
                logger.exception("parameter server: a request of worker %d failed", worker)
                parts, refused = messages.error_reply(PeerError(f"the request failed: {type(e).__name__}: {e}")), True
                failed = e
            connection.send(parts, self._seconds)
            if failed is not None:
                raise PeerError(f"its request failed: {type(failed).__name__}: {failed}") from failed
        finally:
            if request is not None and taken:
                self._steps.release(request.step, taken)
            with self._steps.changed:
                self._requests += 1
                self._refused += refused
        return request is not None and request.kind == CLOSE and not refused

    def _perform(self, worker: int, request: Request, taken: list[Any], check: Callable[[], None]) -> list[Any]:
        """Execute a request, and return the buffers of its reply.

        The entries that must be released after the reply was sent are appended to `taken`. `check` raises PeerError if
        the worker is lost.
        """
        table, steps = self._table, self._steps
        if request.kind == INIT:
            return messages.reply(table.register(request.keys))
        if request.kind == PUSH:
            for number, frame in zip(request.ids, request.frames, strict=True):
                table.check(number, frame)
            steps.push(worker, request.step, dict(zip(request.ids, request.frames, strict=True)), table.name)
        elif request.kind == ABANDON:
            nonfinite = request.argument == messages.ABANDON_NONFINITE
            steps.abandon(worker, request.step, nonfinite=nonfinite)
        elif request.kind != CLOSE:
            reduce = REDUCES[request.argument]
            spec = spec_in(request.spec)
            if reduce != "mean" and spec != LOSSLESS:
                raise SpecError(f"{reduce} has exact results, and cannot be encoded with {spec}")
            keys = [table.key(number) for number in request.ids]
            taken += steps.wait(worker, request.step, request.ids, table.name, self._seconds, check)
            with self._means.transaction() if spec != LOSSLESS else nullcontext():
                values = [
                    entry.result(reduce, spec, partial(self._reduced, key, request.step, reduce, spec, entry))
                    for key, entry in zip(keys, taken, strict=True)
                ]
            return messages.reply(values=values)
        return messages.reply()

    def _reduced(
        self, key: Key, step: int, reduce: str, spec: Spec, entry: KeyFrames, frames: Sequence[Array]
    ) -> tuple[bytes, bytes]:
        """Reduce the frames of a key, in the order of workers; return head and body of the value that is sent."""
        try:
            if self._max_norm is not None and key.dtype in FLOATS:
                for worker, frame in zip(sorted(entry.frames), frames, strict=True):
                    values = codec.reduce([frame], op="sum").reshape(-1)
                    shared = key.name.startswith(messages.INTERNAL)  # magnitudes of several tensors
                    norm = float(np.abs(values).max()) if shared else norm_of(values)
                    check_norm(norm, self._max_norm, worker)
            if reduce == "exact_mean":
                return sums.encode_average(frames)
            if key.dtype not in FLOATS:
                return b"", _largest(frames, key, reduce)
            result = np.empty(key.shape, np.float32)
            codec.reduce(frames, op="max" if reduce == "max" else "mean", out=result)
            dtype: torch.dtype = getattr(torch, key.dtype)
            return b"", self._means.encode(key, step, _compat.from_numpy(result).to(dtype), spec)
        except CodecError as e:
            raise type(e)(f"{messages.label(key.name)}: {e}", e.code) from e


def _largest(frames: Sequence[Array], key: Key, reduce: str) -> bytes:
    """Return a lossless frame of the elementwise maximum of frames of integers."""
    if reduce != "max":
        raise SpecError(
            f"{messages.label(key.name)} is {key.dtype}, and a mean needs floats: pull the maximum, or push floats"
        )
    values = [codec.decode(frame) for frame in frames]
    return bytes(codec.encode(np.maximum.reduce(values)))
