"""Encode the means that a parameter server sends, and store the residuals of lossy means by key."""

import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch

import codec
from codec import CodecError, FrameError, PeerError, StateError, Status
from codec._c.traits import is_lossless
from codec.spec_config import self_contained
from codec.spec_text import spec_of
from codec.specs import Spec, require_feedback
from codec.stateful import checkpoint
from codec.torch import _compat
from codec.torch.network.version import hash64
from codec.torch.parameter_server.messages import Key
from codec.torch.parameter_server.table import server_of
from codec.torch.transport.messages import Array

LOSSLESS = codec.Lossless()  # spec of a pull request without a spec
MAX_SPEC_NBYTES = 1024

_ON_COPY = codec.options(verify_first=False)  # the residual is a copy, which is dropped after an error


def text_of(spec: Spec) -> str:
    """Return the text of a spec in a pull request; :data:`LOSSLESS` has the empty text."""
    return "" if spec == LOSSLESS else str(spec)


def spec_in(text: bytes) -> Spec:
    """Return the spec of a pull request, given the bytes after the numbers of its keys.

    Raises
    ------
    FrameError
        The bytes are too many, or not UTF-8.
    SpecError
        The text is no spec, or frames of the spec need a base or the state of an optimizer.
    """
    if not text:
        return LOSSLESS
    if len(text) > MAX_SPEC_NBYTES:
        raise FrameError(f"the spec of a request has {len(text)} bytes; the maximum is {MAX_SPEC_NBYTES}")
    try:
        return self_contained(spec_of(text.decode()))
    except UnicodeDecodeError:
        raise FrameError("the spec of a request is not UTF-8") from None


class MeanEncoder:
    """Encoder of the means of one server, and their residuals. Any thread may call all methods.

    With error feedback, a key's residual is added to its next mean. The error of the frame becomes the new residual.

    Parameters
    ----------
    servers : sequence of int
        Ranks of all servers.
    rank : int
        Rank of this server.
    feedback : bool
        True: use error feedback with each lossy spec that is a contraction. False: store no residuals.
    """

    def __init__(self, servers: Sequence[int], rank: int, *, feedback: bool) -> None:
        self._servers, self._rank, self._feedback = servers, rank, feedback
        self._residuals: dict[str, Array] = {}  # float32, by name of the key
        self._lock = threading.RLock()

    @contextmanager
    def transaction(self) -> Generator[None, None, None]:
        """Return a context manager for the means of one request. After a CodecError, all residuals are unchanged.

        The server reports a CodecError to all workers that pull the keys. After any other exception, such as a lack of
        memory, other workers may receive the frames that were encoded before it, so their residuals are kept.
        """
        with self._lock:
            before = self._residuals.copy()
            try:
                yield
            except CodecError:
                self._residuals = before
                raise

    def encode(self, key: Key, step: int, mean: torch.Tensor, spec: Spec) -> bytes:
        """Return a frame of a key's mean in a step. Call this in a :meth:`transaction`, if the spec is lossy.

        Raises
        ------
        PeerError
            The mean, or its sum with the residual, holds NaN or Inf, which the spec refuses.
        ArgumentError, SpecError
            The spec does not fit the tensor, or needs error feedback, which this server or the spec does not allow.
        StateError
            A loaded residual has another number of values than the key.
        """
        stream = hash64("parameter server", step, self._rank, key.name) % (1 << 64)
        try:
            if is_lossless(spec) or not (self._feedback and spec.contraction):
                require_feedback(spec, 'create the server with feedback=True, and use rounding="nearest"')
                return codec.encode(mean, spec, stream=stream)
            known = self._residuals.get(key.name)
            residual = np.zeros(mean.numel(), np.float32) if known is None else known.copy()
            if residual.size != mean.numel():
                raise StateError(f"the loaded residual has {residual.size} values, but the key has {mean.numel()}")
            frame = codec.encode(mean, spec, residual=residual, feedback=True, stream=stream, options=_ON_COPY)
            self._residuals[key.name] = residual
            return frame
        except codec.ArgumentError as e:
            if e.code != Status.NONFINITE:
                raise
            text = f"the mean holds NaN or Inf, which {type(spec).__name__} cannot encode"
            raise PeerError(text, Status.NONFINITE) from e

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the residuals, as tensors by ``"name[0:size]"``."""
        with self._lock:
            state = checkpoint.save("server", {((n, 0, x.size),): x for n, x in self._residuals.items()})
        return {n: _compat.from_numpy(cast(Any, x)) if isinstance(x, np.ndarray) else x for n, x in state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the residuals by copies of those in a state; after an error they are unchanged.

        Raises
        ------
        StateError
            `state` is no state of a server, or was saved by a server that holds other keys.
        """
        role, store = checkpoint.load(state)
        loaded: dict[str, Array] = {}
        for ((name, start, _),), residual in store.items():
            if role != "server" or start or server_of(name, self._servers) != self._rank:
                raise StateError(
                    f"the state of another server or object: rank {self._rank} does not hold the residual of {name!r} "
                    f"from value {start} on; restore each server from its own state, with the same servers="
                )
            loaded[name] = residual
        with self._lock:
            self._residuals = loaded
