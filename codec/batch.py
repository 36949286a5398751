"""Many tensors to frames and back, in one call."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from codec._c import pool
from codec.codebook import Codebook, given_codebooks
from codec.decoding import check_limit, engine_for, explain
from codec.encoding import DEFAULT, asked_of, check_stream, one_codebook
from codec.engines import choose
from codec.engines.request import DecodeRequest, EncodeRequest
from codec.errors import ArgumentError, CodecError
from codec.specs import Spec, Truncate
from codec.tensors.view import mark_written, new, view, view_bytes


def encode_many(
    tensors: Any,
    spec: Spec = DEFAULT,
    *,
    engine: str | None = None,
    threads: int | None = None,
    codebook: Codebook | None = None,
    stream: int = 0,
    metric: Any = None,
    state: Any = None,
    dtype: Any = None,
) -> Any:
    """Encode each of many tensors as a frame, as :func:`encode` would.

    Whole tensors are spread over threads. All are encoded, or none.

    Parameters
    ----------
    tensors : sequence or mapping of tensors
    spec, engine, threads, codebook, metric, dtype : optional
        As in :func:`encode`, for all of them.
    stream : int
        Of the first one. The i-th one gets `stream` + i * 2^32, mod 2^64: what tells ranks and steps apart belongs into
        the lower 32 bits.
    state : sequence or mapping of mappings, optional
        The metric's arrays, for each tensor its own.

    Returns
    -------
    list of bytes, or dict of them with the keys of `tensors`

    Raises
    ------
    ArgumentError, SpecError, EngineError, StateError
        As in :func:`encode`, for the first tensor that has an error; its ``item`` is that tensor's index or key, with
        which the message begins.

    Examples
    --------
    >>> parameters = {"weight": np.ones((100, 100), np.float32), "bias": np.zeros(100, np.float32)}
    >>> frames = codec.encode_many(parameters)
    >>> {name: x.shape for name, x in codec.decode_many(frames).items()}
    {'weight': (100, 100), 'bias': (100,)}
    """
    if threads is not None:
        threads = pool.check_threads(threads)
    stream = check_stream(stream)
    book = one_codebook(codebook, spec) if codebook is not None else None
    levels = metric is not None or state is not None or isinstance(spec, Truncate)
    keys, xs = _items("tensors", tensors)
    states = _alike("state=", state, tensors, keys)
    requests: list[EncodeRequest] = []
    chosen = choose(engine, "x", "cpu")
    at: int | None = 0
    try:
        for at, x in enumerate(xs):
            v = view(x, dtype)
            m = asked_of(spec, metric, states[at], v) if levels else None
            chosen = choose(engine, "x", v.device)
            draws = (stream + (at << 32)) % (1 << 64)
            requests.append(new(EncodeRequest, (v, spec, None, None, book, None, draws, m, threads, False)))
        at = None
        frames = chosen.encode_many(requests)
    except CodecError as e:
        _name(e, keys, at)
        raise
    return _like(tensors, keys, frames)


def decode_many(
    frames: Any,
    *,
    out: Any = None,
    like: Any = None,
    engine: str | None = None,
    codebooks: Codebook | Sequence[Codebook] | None = None,
    max_nbytes: int | None = None,
    threads: int | None = None,
    metric: Any = None,
    state: Any = None,
) -> Any:
    """Decode each of many frames, as :func:`decode` would.

    Whole frames are spread over threads.

    Parameters
    ----------
    frames : sequence or mapping of bytes or buffers
    out : sequence or mapping of arrays or tensors, optional
        Where to put the values, for each frame its own, apart from each other. All frames are checked before the first
        byte is written, so that after any error all of `out` is as it was.
    like : array or tensor, optional
        Return tensors of this one's kind.
    engine, codebooks, max_nbytes, threads, metric : optional
        As in :func:`decode`, for all of them; `max_nbytes` is for each one.
    state : sequence or mapping of mappings, optional
        The metric's arrays, for each frame its own.

    Returns
    -------
    list of tensors, or dict of them with the keys of `frames`

    Raises
    ------
    FrameError, StateError, ArgumentError, EngineError
        As in :func:`decode`, for the first frame that has an error; its ``item`` is that frame's index or key, with
        which the message begins.
    """
    if threads is not None:
        threads = pool.check_threads(threads)
    books = given_codebooks(codebooks) if codebooks is not None else ()
    most = None if max_nbytes is None else check_limit(max_nbytes)
    keys, given = _items("frames", frames)
    outs, states = _alike("out=", out, frames, keys), _alike("state=", state, frames, keys)
    requests: list[DecodeRequest] = []
    chosen = choose(engine, "a frame", "cpu")
    at: int | None = 0
    try:
        for at, frame in enumerate(given):
            v = view_bytes(frame)
            requests.append(
                new(DecodeRequest, ((v,), outs[at], like, books, most, threads, metric, states[at], True, None))
            )
            chosen = engine_for(engine, v, outs[at], like)
        at = None
        tensors = chosen.decode_many(requests)
    except CodecError as e:
        index = e.item if at is None else at
        if isinstance(e, ArgumentError) and isinstance(index, int):
            explain(e, view_bytes(given[index]), outs[index])
        _name(e, keys, at)
        raise
    finally:
        for x in outs:
            mark_written(x)
    return _like(frames, keys, tensors)


def _items(name: str, given: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Keys, or indices, and what is there."""
    if isinstance(given, Mapping):
        pairs = cast(Mapping[Any, Any], given)
        return list(pairs), list(pairs.values())
    kind: str = type(given).__name__
    if hasattr(given, "dtype") or isinstance(given, str | bytes | bytearray | memoryview):
        raise ArgumentError(f"{name} must be a sequence or mapping, not one {kind}")
    try:
        items = list(cast(Iterable[Any], given))
    except TypeError:
        raise ArgumentError(f"{name} must be a sequence or mapping, not {kind}") from None
    return range(len(items)), items


def _alike(name: str, given: Any, model: Any, keys: Sequence[Any]) -> Sequence[Any]:
    """For each key what `given`, which has the keys of `model`, has there; None for all if there is none."""
    if given is None:
        return [None] * len(keys)
    if isinstance(model, Mapping) != isinstance(given, Mapping):
        raise ArgumentError(f"{name} must be a mapping if the rest is one, and a sequence otherwise")
    have, items = _items(name, given)
    if len(have) != len(keys) or (isinstance(model, Mapping) and set(have) != set(keys)):
        raise ArgumentError(f"{name} has other keys, or another length, than the rest")
    return [given[key] for key in keys] if isinstance(model, Mapping) else items


def _like(model: Any, keys: Sequence[Any], results: list[Any]) -> Any:
    return dict(zip(keys, results, strict=True)) if isinstance(model, Mapping) else results


def _name(error: CodecError, keys: Sequence[Any], at: int | None) -> None:
    """Say which item it was: that one, or the one whose index an engine has put there."""
    index = error.item if at is None else at
    if isinstance(index, int):
        error.of(keys[index])
