"""Settings of calls: engine, threads and validation; algorithm and timeout of collectives."""

import sys
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from codec._c.traits import needs_base
from codec._secret import secret_of
from codec._security import NONE, Security
from codec._tls import tls_of
from codec.arguments import check_timeout, plain, shown, truth, whole
from codec.errors import ArgumentError, EngineError, SpecError
from codec.presets import resolve
from codec.specs import Preset, Sign, Spec, TopK, Truncate

if TYPE_CHECKING:
    import ssl

Algorithm = Literal["auto", "two_shot", "all_gather", "ring", "raw", "shared_scale"]

EngineName = Literal["native", "numba", "cuda"]

ENGINES: tuple[EngineName, ...] = get_args(EngineName)
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Settings of calls, made by :func:`options`. A setting that is None is not set.

    An instance can be passed to any number of calls, and entered as a context any number of times, in several threads.
    """

    engine: EngineName | None = None
    threads: int | None = None
    verify_first: bool | None = None
    algorithm: Algorithm | None = None
    timeout: timedelta | None = None
    within: Spec | Literal["bfloat16"] | None = None
    security: Security = field(default=NONE, repr=False)
    max_norm: float | None = None
    nontemporal: bool = False  # decode with non-temporal stores; collectives set it for pieces of a large result

    def __enter__(self) -> "CallOptions":
        outer = _scope.get()
        _scope.set(_Scope(self.over(outer.settings), outer))
        return self

    def __exit__(self, *exception: object) -> None:
        outer = _scope.get().outer
        if outer is not None:
            _scope.set(outer)

    def over(self, outer: "CallOptions") -> "CallOptions":
        """Return a copy of these settings in which each setting that is None has the value of `outer`."""
        if outer is _UNSET:
            return self
        own: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        merged: dict[str, Any] = {name: getattr(outer, name) if value is None else value for name, value in own.items()}
        merged["security"] = self.security.over(outer.security)
        return CallOptions(**merged)


class _Scope(NamedTuple):
    """Settings of a context, merged with those of the contexts around it."""

    settings: CallOptions
    outer: "_Scope | None"


_UNSET = CallOptions()
_scope: ContextVar[_Scope] = ContextVar("codec_options", default=_Scope(_UNSET, None))  # noqa: B039 - immutable


def options(
    engine: EngineName | None = None,
    threads: int | None = None,
    verify_first: bool | None = None,
    algorithm: Algorithm | None = None,
    timeout: float | timedelta | None = None,
    within: Spec | Preset | Literal["bfloat16"] | None = None,
    secret: bytes | str | None = None,
    tls: Literal["psk"] | tuple["ssl.SSLContext", "ssl.SSLContext"] | None = None,
    max_norm: float | None = None,
) -> CallOptions:
    """Return settings for one call, passed as ``options=``, or for all calls inside a ``with`` block.

    No setting changes a byte of a frame, or a decoded value. Only `algorithm` and `within` change results, and only
    those of collectives: they decide in which order values are added, and which of them are encoded.

    Contexts nest: a setting that is None is inherited from the context around it, and a call's ``options=`` override
    those of its context. A context applies to the thread, or the asyncio task, that has entered it.

    Parameters
    ----------
    engine : str, optional
        One of :func:`engines`. Default: the engine for the device of the tensor.
    threads : int, optional
        Number of threads, 1 or more. Default: chosen from the size of the tensors, and at most ``CODEC_NUM_THREADS``,
        ``OMP_NUM_THREADS`` or the number of CPUs.
    verify_first : bool, optional
        True, the default: validate all input before the first byte of `out` or `residual` is written, so that both are
        unchanged after an error. False skips this validation pass; after an error `out` and `residual` are undefined.
    algorithm : str, optional
        Algorithm of all-reduces of :mod:`codec.torch`, one of "auto", "two_shot", "all_gather", "ring", "raw" and
        "shared_scale"; see :func:`codec.torch.all_reduce`. Default: "auto", which chooses by measured times, so that
        results of lossy codecs may differ from run to run. Other calls ignore it.
    timeout : float or datetime.timedelta, optional
        Longest time, in seconds or as a timedelta from 1 ms to 10 years, for which calls of :mod:`codec.torch` wait for
        another rank. Default: the timeout of the process group. Other calls ignore it.
    within : Spec, str or None, optional
        Codec, or the name of a preset, in which all-reduces of :mod:`codec.torch` over two levels send values within a
        machine, before and after frames are sent between machines; such as ``Float8()`` with ``Quantize(4)`` between
        machines. "bfloat16": float32 values are rounded to bfloat16. There is no error feedback for these errors.
        Tensors of up to 64 KiB stay uncompressed. Default: all tensors do. Other calls ignore it.
    secret : bytes or str, optional
        Secret of 16 bytes or more, equal on all ranks, for the first call of :mod:`codec.torch` that uses a group: all
        TCP connections of the group prove it. Default: that of the file ``CODEC_SECRET_FILE``, or ``CODEC_SECRET``.
    tls : str or pair of ssl.SSLContext, optional
        Encryption of these connections by TLS 1.3, in the same call. "psk": ranks authenticate by their secret. A pair:
        contexts of the rank that listens and of the one that connects, which both require certificates unless there is
        a secret. Default: ``CODEC_TLS=psk``, or the files ``CODEC_TLS_CERT``, ``CODEC_TLS_KEY`` and ``CODEC_TLS_CA``;
        if none is set, messages are not encrypted, and without a secret not authenticated.
    max_norm : float, optional
        Largest L2 norm, above 0, of the decoded values of one frame, or of one message of uncompressed values, that a
        rank sends. If the norm is larger, NaN or Inf, collectives of :mod:`codec.torch` raise FrameError on the ranks
        that detect it, and PeerError on all others. The errors name the rank; no tensor is changed. For a sum over N
        ranks, the bound is N times `max_norm`. Leave room for residuals and for the error of the codec. With a
        GradScaler, steps that overflow are errors. Ranks may have different bounds. Each received frame is decoded
        twice. Default: no bound. Other calls ignore `max_norm`.

    Returns
    -------
    CallOptions
        Immutable; also a context manager.

    Raises
    ------
    ArgumentError
        A setting has another type or is out of range, or there is no such algorithm.
    SpecError
        `within` is no spec, needs error feedback (:class:`Sign`, :class:`TopK`), an optimizer or a base.
    EngineError
        There is no such engine. If the engine cannot be used on this machine, the calls raise EngineError.

    Examples
    --------
    >>> x = np.ones(1000, np.float32)
    >>> frame = codec.encode(x, options=codec.options(threads=1))
    >>> with codec.options(engine="native", threads=4):
    ...     with codec.options(threads=1):  # the engine is still "native"
    ...         codec.encode(x) == frame
    True
    """
    try:
        hidden = None if secret is None else secret_of(secret)
    finally:
        del secret  # tracebacks may show local variables
    if engine is not None and (not isinstance(engine, str) or engine not in ENGINES):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise EngineError(f"engine must be one of {', '.join(ENGINES)}, got {shown(engine)}")
    return CallOptions(
        engine,
        None if threads is None else whole("threads", threads, 1),
        None if verify_first is None else truth("verify_first", verify_first),
        None if algorithm is None else check_algorithm(algorithm),
        check_timeout(timeout),
        None if within is None else _check_within(within),
        Security(hidden, None if tls is None else tls_of(tls)),
        None if max_norm is None else _check_norm(max_norm),
    )


def _check_norm(value: Any) -> float:
    """Return the argument `max_norm` as a float; raise ArgumentError unless it is a finite number above 0."""
    norm = plain(value)
    if type(norm) not in (int, float) or not 0 < norm <= sys.float_info.max:
        raise ArgumentError(f"max_norm must be a finite number above 0, got {shown(value)}")
    return float(norm)


def check_algorithm(algorithm: Any) -> Algorithm:
    """Return the name of an algorithm; raise ArgumentError for anything else."""
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise ArgumentError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {shown(algorithm)}")
    return algorithm


def _check_within(within: Any) -> Spec | Literal["bfloat16"]:
    """Return the argument `within` with a spec in place of a preset's name."""
    if isinstance(within, str) and within == "bfloat16":
        return "bfloat16"
    spec, bound_spec = resolve(within)
    problem = None
    if isinstance(spec, Sign | TopK) or (isinstance(spec, Truncate) and spec.guard == "feedback"):
        problem = "needs error feedback, which values within a machine do not have"
    elif bound_spec is not None or (isinstance(spec, Truncate) and spec.fixed_level is None):
        problem = "needs an optimizer's state, which differs from step to step"
    elif needs_base(spec):
        problem = "needs a base, which all-reduces do not have"
    if problem is not None:
        raise SpecError(f'within={shown(within)} {problem}: pass another spec, such as Float8(), or "bfloat16"')
    return spec


def settings_of(given: CallOptions | None) -> CallOptions:
    """Return the settings of a call: its ``options=``, completed by the settings of its context."""
    settings = _scope.get().settings
    if given is None:
        return settings
    if type(given) is not CallOptions:
        raise ArgumentError(f"options must be made by codec.options(...), got {shown(given)}")
    return given.over(settings)
