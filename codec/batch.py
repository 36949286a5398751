"""Encoding and decoding of many tensors in one call."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast, overload

from codec._options import CallOptions, settings_of
from codec.arguments import shown, truth
from codec.codebook import Codebook, given_codebooks
from codec.decoding import check_bound, check_limit, decode_request, engine_for, explain
from codec.encoding import DEFAULT, check_stream, encode_request, one_codebook
from codec.engines import choose
from codec.engines.request import DecodeRequest, EncodeRequest
from codec.errors import ArgumentError, CodecError, SpecError
from codec.explain import explain as explain_encoding
from codec.packs import Pack, decode_pack, encode_pack, is_pack
from codec.presets import resolve
from codec.specs import BoundSpec, Spec, SpecLike
from codec.tensors.jax_arrays import of_kind
from codec.tensors.overlap import check_iterated
from codec.tensors.view import Array, TensorView, mark_written, view_bytes
from codec.tensors.wrapper import View

Key = TypeVar("Key")
Tensor = TypeVar("Tensor")
Codebooks = Codebook | Sequence[Codebook] | None


@overload
def encode_many(
    tensors: Mapping[Key, Any],
    spec: SpecLike | Sequence[SpecLike] | Mapping[Key, SpecLike] = DEFAULT,
    *,
    base: Any = None,
    codebook: Codebook | None = None,
    stream: int = 0,
    pack: Literal[False] = False,
    options: CallOptions | None = None,
) -> dict[Key, bytes]: ...
@overload
def encode_many(
    tensors: Sequence[Any] | Iterator[Any],
    spec: SpecLike | Sequence[SpecLike] = DEFAULT,
    *,
    base: Any = None,
    codebook: Codebook | None = None,
    stream: int = 0,
    pack: Literal[False] = False,
    options: CallOptions | None = None,
) -> list[bytes]: ...
@overload
def encode_many(
    tensors: Mapping[str, Any] | Sequence[Any] | Iterator[Any],
    spec: SpecLike | Sequence[SpecLike] | Mapping[str, SpecLike] = DEFAULT,
    *,
    base: Any = None,
    codebook: Codebook | None = None,
    stream: int = 0,
    pack: Literal[True],
    options: CallOptions | None = None,
) -> bytes: ...
def encode_many(
    tensors: Any,
    spec: Any = DEFAULT,
    *,
    base: Any = None,
    codebook: Codebook | None = None,
    stream: int = 0,
    pack: bool = False,
    options: CallOptions | None = None,
) -> Any:
    """Encode each of many tensors as a frame, as :func:`encode` does, or all of them as one pack.

    Small tensors are distributed over threads. If a tensor cannot be encoded, no frame is returned.

    Parameters
    ----------
    tensors : iterable or mapping of arrays, tensors, buffers or Views
        Tensors as :func:`encode` takes them, all on one device. An iterator is read to its end before tensors are
        encoded, so each of its tensors must have memory of its own.
    spec : Spec, bound spec or name of a preset; or sequence or mapping of them
        One spec for all tensors, or a spec for each: a sequence, or a mapping with the same keys if `tensors` is a
        mapping. Specs bound to an optimizer must be given for each tensor.
    base : iterable or mapping of arrays or tensors, optional
        As in :func:`encode`, for each tensor; None for a tensor whose spec takes no base.
    codebook : Codebook, optional
        As in :func:`encode`, for all tensors.
    stream : int
        Number of the first tensor's stream of random bits. Tensor i uses stream (`stream` + i * 2^32) mod 2^64, so put
        rank and step into the lower 32 bits.
    pack : bool
        True: return one bytes object, a pack, in which tensors of fewer than 4,096 values share frames. It needs fewer
        bytes if there are many such tensors (``python bench/codec/calls.py``). The tensors lie in host memory, and the
        keys of a mapping are str. Tensors with a base, a bound spec, segments of their own or :class:`TopK` have their
        own frames. Frame i of the pack uses the stream of tensor i. Lossy codecs may give other values than without
        `pack`, because tiny tensors can share scales (see :func:`view`).
    options : CallOptions, optional
        Engine and threads, made by :func:`options`.

    Returns
    -------
    list of bytes, or dict of bytes with the keys of `tensors`; with `pack`, bytes

    Raises
    ------
    ArgumentError, SpecError, EngineError, StateError
        As in :func:`encode`, for the first tensor that has an error. Its ``item`` is the index or key of that tensor,
        with which the message begins.

    Examples
    --------
    >>> parameters = {"weight": np.ones((100, 100), np.float32), "bias": np.zeros(100, np.float32)}
    >>> frames = codec.encode_many(parameters)
    >>> {name: x.shape for name, x in codec.decode_many(frames).items()}
    {'weight': (100, 100), 'bias': (100,)}
    >>> pack = codec.encode_many(parameters, pack=True)
    >>> {name: x.shape for name, x in codec.decode_many(pack).items()}
    {'weight': (100, 100), 'bias': (100,)}
    """
    settings, stream = settings_of(options), check_stream(stream)
    keys, xs = _items("tensors", tensors)
    one = isinstance(spec, Spec | BoundSpec | str) or not hasattr(spec, "__iter__")
    specs = cast(Sequence[SpecLike], [spec] * len(keys) if one else _alike("spec=", spec, tensors, keys))
    bases = _alike("base=", base, tensors, keys)
    if one:  # raise errors of the common spec and codebook without the name of a tensor
        kind, _ = resolve(spec)
        codebook = None if codebook is None else one_codebook(codebook, kind)
    if truth("pack", pack):
        how = {"codebook": codebook, "stream": stream, "options": options}
        return encode_pack(keys if isinstance(tensors, Mapping) else None, encode_many, xs, specs, bases, how)
    requests: list[EncodeRequest] = []
    chosen = choose(settings.engine, "x", "cpu")
    at: int | None = 0
    try:
        for at, x in enumerate(xs):
            number = (stream + (at << 32)) % (1 << 64)
            r = encode_request(x, specs[at], settings, codebook=codebook, stream=number, base=bases[at])
            chosen = choose(settings.engine, "x", r.x.device)
            requests.append(r)
        at = None
        check_iterated("tensors", tensors, (r.x for r in requests))
        check_iterated("base=", base, (r.base for r in requests if r.base is not None))
        frames = chosen.encode_many(requests)
    except CodecError as e:
        if isinstance(e, ArgumentError | SpecError) and isinstance(e.item, int):
            explain_encoding(e, requests[e.item])
        _name(e, keys, at)
        raise
    return _like(tensors, keys, frames)


@overload
def decode_many(
    frames: Mapping[Key, Any],
    spec: BoundSpec | Mapping[Key, BoundSpec | None] | None = None,
    *,
    base: Any = None,
    out: None = None,
    like: None = None,
    codebooks: Codebooks = None,
    max_nbytes: int | None = None,
    options: CallOptions | None = None,
) -> dict[Key, Array]: ...
@overload
def decode_many(
    frames: Mapping[Key, Any],
    spec: BoundSpec | Mapping[Key, BoundSpec | None] | None = None,
    *,
    base: Any = None,
    out: Mapping[Key, Tensor],
    like: Any = None,
    codebooks: Codebooks = None,
    max_nbytes: int | None = None,
    options: CallOptions | None = None,
) -> dict[Key, Tensor]: ...
@overload
def decode_many(
    frames: Mapping[Key, Any],
    spec: BoundSpec | Mapping[Key, BoundSpec | None] | None = None,
    *,
    base: Any = None,
    out: None = None,
    like: Tensor,
    codebooks: Codebooks = None,
    max_nbytes: int | None = None,
    options: CallOptions | None = None,
) -> dict[Key, Tensor]: ...
@overload
def decode_many(
    frames: Sequence[Any] | Iterator[Any],
    spec: BoundSpec | Sequence[BoundSpec | None] | None = None,
    *,
    base: Any = None,
    out: None = None,
    like: None = None,
    codebooks: Codebooks = None,
    max_nbytes: int | None = None,
    options: CallOptions | None = None,
) -> list[Array]: ...
@overload
def decode_many(
    frames: Sequence[Any] | Iterator[Any],
    spec: BoundSpec | Sequence[BoundSpec | None] | None = None,
    *,
    base: Any = None,
    out: Sequence[Tensor] | Iterator[Tensor],
    like: Any = None,
    codebooks: Codebooks = None,
    max_nbytes: int | None = None,
    options: CallOptions | None = None,
) -> list[Tensor]: ...
@overload
def decode_many(
    frames: Sequence[Any] | Iterator[Any],
    spec: BoundSpec | Sequence[BoundSpec | None] | None = None,
    *,
    base: Any = None,
    out: None = None,
    like: Tensor,
    codebooks: Codebooks = None,
    max_nbytes: int | None = None,
    options: CallOptions | None = None,
) -> list[Tensor]: ...
def decode_many(
    frames: Any,
    spec: Any = None,
    *,
    base: Any = None,
    out: Any = None,
    like: Any = None,
    codebooks: Codebooks = None,
    max_nbytes: int | None = None,
    options: CallOptions | None = None,
) -> Any:
    """Decode each of many frames, as :func:`decode` does, or all tensors of a pack.

    Small frames are distributed over threads.

    Parameters
    ----------
    frames : iterable or mapping of bytes or buffers; or bytes or buffer
        Whole frames, all on one device; or a pack, which :func:`encode_many` has made. For a pack, other arguments and
        the result have an item for each tensor of the pack, by name if tensors have names.
    spec : BoundSpec, or sequence or mapping of BoundSpec or None; optional
        As in :func:`decode`: for all frames, or for each frame.
    base : iterable or mapping of arrays or tensors, optional
        As in :func:`decode`, for each frame; None for a frame that needs no base.
    out : iterable or mapping of arrays or tensors, optional
        Receives the values of each frame; items must not overlap each other. After an error all of `out` is unchanged.
        Items may be those of `base`: a model is then updated in place, as a whole or not at all.
    like : array or tensor, optional
        Example of the results' type and device, such as a torch tensor or a JAX array.
    codebooks, options : optional
        As in :func:`decode`, for all frames. Tensors are always validated before `out` is written.
    max_nbytes : int, optional
        As in :func:`decode`, for each tensor; for a pack, for all its tensors together.

    Returns
    -------
    list of tensors, or dict of tensors with the keys of `frames` or the names in the pack

    Raises
    ------
    FrameError, StateError, ArgumentError, SpecError, EngineError
        As in :func:`decode`, for the first frame that has an error. Its ``item`` is the index or key of that frame,
        with which the message begins.

    Examples
    --------
    >>> frames = codec.encode_many([np.ones(1000, np.float32), np.zeros(10, np.float32)])
    >>> out = np.empty(1000, np.float32), np.empty(10, np.float32)
    >>> codec.decode_many(frames, out=out)[0] is out[0]
    True
    """
    settings = settings_of(options)
    books = None if codebooks is None else given_codebooks(codebooks)
    most = None if max_nbytes is None else check_limit(max_nbytes)
    if is_pack(frames):
        how = {"like": like, "codebooks": codebooks, "options": options}
        memory = view_bytes(frames)  # contiguous, also if an array is not
        return _decode_pack(Pack(memory.array()), memory, spec, base, out, most, how)
    keys, given = _items("frames", frames)
    outs = _alike("out=", out, frames, keys)
    bases = _alike("base=", base, frames, keys)
    one = spec is None or isinstance(spec, BoundSpec | str) or not hasattr(spec, "__iter__")
    specs = [spec] * len(keys) if one else _alike("spec=", spec, frames, keys)
    if one and spec is not None:
        check_bound(spec)
    requests: list[DecodeRequest] = []
    chosen = choose(settings.engine, "a frame", "cpu")
    at: int | None = 0
    try:
        for at, frame in enumerate(given):
            v = view_bytes(frame)
            requests.append(decode_request((v,), specs[at], settings, outs[at], like, books, most, bases[at]))
            chosen = engine_for(settings.engine, v, outs[at], like)
        at = None
        check_iterated("frames", frames, (r.frames[0] for r in requests))
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
    return _like(frames, keys, tensors if like is None else [of_kind(x, like) for x in tensors])


def _decode_pack(pack: Pack, memory: TensorView, spec: Any, base: Any, out: Any, most: int | None, how: Any) -> Any:
    """Return the tensors of a pack. `memory`: all its bytes; `how`: keyword arguments of :func:`decode_many`."""
    model: Any = dict.fromkeys(pack.keys) if pack.named else pack.keys
    outs, bases = _alike("out=", out, model, pack.keys), _alike("base=", base, model, pack.keys)
    if spec is None or isinstance(spec, BoundSpec | str) or not hasattr(spec, "__iter__"):
        specs = [None if spec is None else check_bound(spec)] * len(pack.keys)
    else:
        specs = _alike("spec=", spec, model, pack.keys)
    DecodeRequest((memory,), out, max_nbytes=most).check_limit(pack.nbytes)
    try:
        found = decode_pack(pack, memory, decode_many, specs, bases, outs, {"max_nbytes": most, **how})
    finally:
        for x in outs:
            mark_written(x)
    return _like(model, pack.keys, [of_kind(x, how["like"]) for x in found])


def _items(name: str, given: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the keys (of a sequence: the indices) and the items of an argument."""
    if isinstance(given, Mapping):
        pairs = cast(Mapping[Any, Any], given)
        return list(pairs), list(pairs.values())
    kind: str = type(given).__name__
    if hasattr(given, "dtype") or isinstance(given, str | bytes | bytearray | memoryview | View):
        raise ArgumentError(f"{name} must be a sequence or mapping, not one {kind}")
    try:
        items = list(cast(Iterable[Any], given))
    except TypeError:
        raise ArgumentError(f"{name} must be a sequence or mapping, not {kind}") from None
    return range(len(items)), items


def _alike(name: str, given: Any, model: Any, keys: Sequence[Any]) -> Sequence[Any]:
    """Return the items of `given` in the order of `keys`, the keys of `model`. If `given` is None, so is each item."""
    if given is None:
        return [None] * len(keys)
    if isinstance(model, Mapping) != isinstance(given, Mapping):
        kind = "a mapping" if isinstance(model, Mapping) else "a sequence"
        raise ArgumentError(f"{name} must be {kind}, as the first argument is, not {type(given).__name__}")
    have, items = _items(name, given)
    if isinstance(model, Mapping):
        faults = [f"lacks {shown(key)}" for key in keys if key not in given]
        if faults := faults or [f"has {shown(key)}, too" for key in have if key not in model]:
            raise ArgumentError(f"{name} must have the keys of the first argument, but {faults[0]}")
    if len(have) != len(keys):
        raise ArgumentError(f"{name} must have as many items as the first argument, {len(keys)}, got {len(have)}")
    return [given[key] for key in keys] if isinstance(model, Mapping) else items


def _like(model: Any, keys: Sequence[Any], results: list[Any]) -> Any:
    return dict(zip(keys, results, strict=True)) if isinstance(model, Mapping) else results


def _name(error: CodecError, keys: Sequence[Any], at: int | None) -> None:
    """Replace an index by its key in ``error.item``. `at`: the index; None: an engine has set ``error.item`` to it."""
    index = error.item if at is None else at
    if isinstance(index, int):
        error.of(keys[index])
