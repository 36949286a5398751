"""Frames of one array, or of a stream of values, which ``codec pack`` writes and ``codec unpack`` restores."""

import argparse
import os
from collections.abc import Iterator
from io import BufferedReader
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from codec import readable
from codec._c.library import ITEMSIZE, UNSIGNED
from codec._options import options
from codec.cli.console import (
    STANDARD,
    check_output,
    check_signed,
    output_file,
    progress_bar,
    report,
    signed_output,
)
from codec.decoding import decode
from codec.encoding import encode
from codec.errors import ArgumentError, FrameError
from codec.files.arrays import numpy_dtype
from codec.files.opening import NUMPY, open_regular, printable, standard_input
from codec.inspection import inspect, verify
from codec.spec_text import spec_of
from codec.tensors.view import dtype_name
from codec.tensors.wrapper import view

_SUFFIX = ".codec"
_BLOCK = 1 << 26  # uncompressed bytes per frame, for a stream without --shape
_HEADER, _CHUNK = 112, 1 << 20  # bytes per read: a frame's header first, then chunks of the frame
_NPY_HEADER = 128  # bytes reserved for a .npy file's header, which is written last, with the array's length


def pack_array(args: argparse.Namespace) -> int:
    """Encode a .npy array as a frame, or raw values as one frame or as a frame of every 64 MiB."""
    output = args.output or (STANDARD if args.file == STANDARD else args.file + _SUFFIX)
    args.output = output = check_output(output, args.force, args.file)
    check_signed(args, output)
    spec, given = spec_of(args.codec or "lossless"), options(threads=args.threads)
    before = after = frames = 0
    with _opened(args.file) as source, signed_output(args, output, args.file) as file, progress_bar() as progress:
        for x in _arrays(source, args):
            frame = encode(x, spec, options=given)
            file.write(frame)
            before, after, frames = before + x.tensor.nbytes, after + len(frame), frames + 1
            if progress is not None:
                progress(before, max(before, _size(source)))
    entries = {"file": output, "frames": frames, "input_nbytes": before, "output_nbytes": after,
               "ratio": after / max(1, before)}  # fmt: skip
    report(args, entries, f"{output}: {readable.size(before)} to {readable.size(after)} "
                          f"({100 * entries['ratio']:.1f}%)")  # fmt: skip
    return 0


def unpack_frames(args: argparse.Namespace) -> int:
    """Decode a frame, or a stream of frames."""
    output = args.output or (STANDARD if args.file == STANDARD else args.file.removesuffix(_SUFFIX))
    if output == args.file and output != STANDARD:
        raise ArgumentError(f"{printable(args.file)} does not end in {_SUFFIX}: name the output with -o")
    if output.endswith((".npz", ".pt", ".pth", ".safetensors")):
        raise ArgumentError(f"{printable(args.file)} has frames: write a .npy file or raw values, not {output}")
    args.output = output = check_output(output, args.force, args.file)
    given, npy = options(threads=args.threads), args.npy or output.endswith(".npy")
    before = after = 0
    whole: tuple[str, tuple[int, ...]] | None = None  # dtype and shape of the values of all frames so far
    with _opened(args.file) as source, output_file(output, args.file) as file, progress_bar() as progress:
        if npy:
            file.write(bytes(_NPY_HEADER))
        for frame in _frames(source, args.file):
            info = inspect(frame)
            values = np.empty(info.tensor_nbytes, np.uint8)
            decode(frame, out=values.view(UNSIGNED[info.dtype]).reshape(info.shape), options=given)
            file.write(memoryview(cast(Any, values)))
            whole = _joined(whole, info.dtype, info.shape) if npy else None
            before, after = before + len(frame), after + len(values)
            if progress is not None:
                progress(before, max(before, _size(source)))
        if npy:
            if whole is None:
                raise ArgumentError(f"{printable(args.file)} is empty: a .npy file needs at least one frame")
            file.seek(0)
            file.write(_npy_header(*whole))
            file.seek(0, os.SEEK_END)
    entries = {"file": output, "input_nbytes": before, "output_nbytes": after}
    report(args, entries, f"{output}: {readable.size(before)} to {readable.size(after)}")
    return 0


def _opened(path: str) -> BufferedReader:
    return standard_input() if path == STANDARD else os.fdopen(open_regular(path), "rb")


def _size(source: BufferedReader) -> int:
    return os.fstat(source.fileno()).st_size


def _arrays(source: BufferedReader, args: argparse.Namespace) -> Iterator[Any]:
    """Yield the array of a .npy file, or of a raw file (in blocks, without --shape), viewed as `args.dtype`."""
    if source.peek(len(NUMPY))[: len(NUMPY)] == NUMPY:
        if args.shape is not None:
            raise ArgumentError(
                f"--shape is for raw values, but {printable(args.file)} is a .npy file: leave out --shape"
            )
        yield view(_npy(source, args.file), args.dtype)
        return
    if args.dtype is None:
        raise ArgumentError(
            f"{printable(args.file)} is not a .npy file: for raw values pass --dtype, such as --dtype bfloat16"
        )
    dtype = dtype_name(args.dtype)
    size = ITEMSIZE[dtype]
    if args.shape is not None:
        shape = _shape(args.shape)
        need = int(np.prod(shape, dtype=object)) * size
        values = source.read(min(need, 1 << 62)) if need <= _available(source) else b""
        if len(values) != need or source.read(1):
            raise ArgumentError(f"the input does not have the {need} bytes of --dtype {dtype} --shape {args.shape}")
        yield view(np.frombuffer(values, UNSIGNED[dtype]).reshape(shape), dtype)
        return
    while values := source.read(_BLOCK):
        if len(values) % size:
            raise ArgumentError(f"the input must be a multiple of {size} bytes long for --dtype {dtype}")
        yield view(np.frombuffer(values, UNSIGNED[dtype]), dtype)


def _available(source: BufferedReader) -> int:
    """Return the size of a regular file in bytes, or a huge number for a pipe."""
    return _size(source) or 1 << 62


def _npy(source: BufferedReader, name: str) -> Any:
    try:
        x = np.load(source, allow_pickle=False) if source.seekable() else _npy_stream(source)
    except (ValueError, EOFError, MemoryError) as e:
        raise ArgumentError(f"{printable(name)} cannot be read as a .npy file: {e}") from None
    return np.ascontiguousarray(x).reshape(x.shape)


def _npy_stream(source: BufferedReader) -> Any:
    """Read the array of a .npy file from a stream that cannot seek.

    numpy asks an object with a file descriptor for its position, which a pipe does not have. So `read` is passed alone.
    """
    return np.lib.format.read_array(cast(Any, SimpleNamespace(read=source.read)), allow_pickle=False)


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(n) for n in text.replace("x", ",").split(",") if n.strip())
    except ValueError:
        shape = (-1,)
    if any(n < 0 for n in shape):
        raise ArgumentError(f"--shape must be whole numbers, such as 512,1024, got {text!r}")
    return shape


def _frames(source: BufferedReader, name: str) -> Iterator[bytearray]:
    """Read, verify and yield frames one by one; the header of each gives its length. Errors have the input's name."""
    rest = bytearray()  # first bytes of the next frame, which were read together with the last bytes of this one
    try:
        while frame := rest + source.read(_HEADER - len(rest)):
            nbytes = inspect(frame).nbytes
            frame, rest = frame[:nbytes], frame[nbytes:]
            while len(frame) < nbytes and (more := source.read(min(_CHUNK, nbytes - len(frame)))):
                frame += more
            verify(frame)
            yield frame
    except FrameError as e:
        e.of(name)
        raise


def _joined(
    whole: tuple[str, tuple[int, ...]] | None, dtype: str, shape: tuple[int, ...]
) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape after a frame is appended to values of dtype and shape `whole` (None: no values yet)."""
    if whole is None:
        return dtype, shape
    if whole[0] != dtype or len(shape) != 1 or len(whole[1]) != 1:
        raise ArgumentError(
            f"the input has several arrays, {whole[0]} {whole[1]} and {dtype} {shape}, which one .npy file cannot "
            "hold: write raw values, by -o FILE without .npy"
        )
    return dtype, (whole[1][0] + shape[0],)


def _npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the header of a .npy file, padded to the _NPY_HEADER bytes reserved for it."""
    descr = np.lib.format.dtype_to_descr(numpy_dtype(dtype))
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    return (
        NUMPY + b"\x01\x00" + (_NPY_HEADER - 10).to_bytes(2, "little") + text.encode().ljust(_NPY_HEADER - 11) + b"\n"
    )
