"""The command line.

``python -m codec advise FILE.npz --link 100mbit``: which codec pays for the gradients in a file.
``python -m codec inspect FRAME``, ``verify FRAME``: what a frame in a file says of itself, and whether it is whole.
``python -m codec warmup``: compile the Numba engine's kernels, in an image for example.
``python -m codec --cflags --libs``: how to build C against the library in this package.
"""

import argparse
import json
import shlex
import sys
import zlib
from dataclasses import fields
from pathlib import Path
from typing import Any, cast, get_args
from zipfile import BadZipFile

import numpy as np

import codec
from codec import _cffi
from codec.advising import advise, named
from codec.core import ITEMSIZE
from codec.errors import CodecError, SpecError
from codec.frame import inspect, verify
from codec.predicting import Algorithm
from codec.view import Array, dtype_name
from codec.warming import warmup


def arrays_of(path: str, names: list[str], dtype: str | None) -> dict[str, Array]:
    """Arrays of an .npz file: those named, or else all of floats; of a dtype that is given, those that may hold it.

    Raises
    ------
    SpecError
        The file has no array of a name, or is no .npz file.
    """
    try:
        with open(path, "rb") as f:
            file = np.load(f)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise SpecError(f"{path} holds one array: save it by numpy.savez")
            if missing := set(names) - set(file.files):
                raise SpecError(f"{path} has {', '.join(file.files)}, not {', '.join(sorted(missing))}")
            found = {name: cast(Array, file[name]) for name in names or file.files}
    except SpecError:
        raise
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error) as e:
        raise SpecError(f"{path} cannot be read: {e}") from None
    if dtype is None:
        return found if names else {k: x for k, x in found.items() if x.dtype in (np.float32, np.float16) and x.ndim}
    name = dtype_name(dtype)
    bits = np.dtype(f"u{ITEMSIZE[name]}")
    # as numpy saves dtypes that it does not have, such as ml_dtypes'
    found = {k: x.view(bits) if x.dtype == np.dtype((np.void, bits.itemsize)) else x for k, x in found.items()}
    return found if names else {k: x for k, x in found.items() if x.dtype.name in (name, bits.name) and x.ndim}


def bytes_of(path: str) -> bytes:
    """A file's."""
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise SpecError(f"{path} cannot be read: {e}") from None


def run_advise(args: argparse.Namespace) -> None:
    """Print what :func:`codec.advise` says of a file."""
    arrays = arrays_of(args.file, args.arrays, args.dtype)
    total = sum(x.nbytes for x in arrays.values()) / 1e6
    print(f"measuring {', '.join(arrays) or 'nothing'}: {total:.3g} MB", file=sys.stderr, flush=True)
    advice = advise(
        arrays,
        args.link,
        world_size=args.ranks,
        algorithm=args.algorithm,
        lossy=args.lossy,
        feedback=args.feedback,
        threads=args.threads,
        dtype=args.dtype,
    )
    print(advice.to_json() if args.json else advice)


def run_inspect(args: argparse.Namespace) -> None:
    """Print what :func:`codec.inspect` says of a file."""
    info = inspect(bytes_of(args.file))
    told = {f.name: getattr(info, f.name) for f in fields(info)} | {"spec": named(info.spec), "ratio": info.ratio}
    print(json.dumps(told, indent=1) if args.json else "\n".join(f"{name:14} {value}" for name, value in told.items()))


def run_verify(args: argparse.Namespace) -> None:
    """Do what :func:`codec.verify` does to files."""
    for file in args.files:
        frame = bytes_of(file)
        try:
            verify(frame)
        except CodecError as e:
            e.of(file)
            raise
        print(f"{file}: a whole frame")


def run_warmup(args: argparse.Namespace) -> None:
    """Compile the kernels that dtypes need."""
    warmup(dtypes=args.dtypes)


def run_told(args: argparse.Namespace) -> None:
    """Print what build tools ask, a line each, in the order asked."""
    package = Path(_cffi.__file__).parent  # this file may lie elsewhere
    include, lib = package / "include", package / "lib"
    if not (include / "codec" / "codec.h").exists():
        raise CodecError(f"no C headers in {include}: they come with the installed package (pip install)")
    say = {
        "cflags": shlex.quote(f"-I{include}"),
        "libs": shlex.join([f"-L{lib}", "-lcodec", f"-Wl,-rpath,{lib}"]),  # found there at run time, too
        "pkgconfigdir": str(lib / "pkgconfig"),
        "cmakedir": str(lib / "cmake" / "codec"),
    }
    print(*(say[name] for name in args.told), sep="\n")


def main(argv: list[str] | None = None) -> int:
    """Run a command; 1 if it failed, for what stands on stderr."""
    parser: Any = argparse.ArgumentParser(prog="python -m codec", description="Compression of tensors on the wire.")
    for name, of in {
        "cflags": "compiler flags for programs that use the C library",
        "libs": "linker flags for them",
        "pkgconfigdir": "folder of codec.pc, for PKG_CONFIG_PATH",
        "cmakedir": "folder of the CMake package, for -Dcodec_DIR=",
    }.items():
        parser.add_argument(f"--{name}", dest="told", action="append_const", const=name, help=f"print {of}")
    parser.add_argument("--version", action="version", version=codec.__version__)
    parser.set_defaults(run=run_told)
    commands = parser.add_subparsers(metavar="command")
    told = "Measure gradients and say which codec makes an all-reduce of them fastest on a link."
    compiled = "Compile all kernels of the Numba engine ahead, and keep them for all processes to come."
    usage = "%(prog)s FILE.npz [ARRAY ...] --link LINK [options]"  # arrays behind options would not be seen as such
    p = commands.add_parser("advise", help="which codec pays on a link", description=told, usage=usage)
    p.add_argument("file", help=".npz file with the gradients of a step")
    p.add_argument(
        "arrays", nargs="*", help="its arrays that are meant; left out: all of float32 and float16, or of --dtype"
    )
    p.add_argument("--link", required=True, help="100mbit, 10Gbps, or bits a second")
    p.add_argument("--ranks", type=int, default=4, help="default: %(default)s")
    p.add_argument("--algorithm", choices=get_args(Algorithm), default="two_shot", help="default: %(default)s")
    p.add_argument("--lossy", action="store_true", help="codecs that lose something are candidates, too")
    p.add_argument("--feedback", action="store_true", help="with error feedback: Ternary and Sign, too")
    p.add_argument("--threads", type=int, help="to encode and decode; left out: as many as pay")
    p.add_argument("--dtype", help="take arrays of bits as this dtype: bfloat16 for uint16")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=run_advise)
    p = commands.add_parser("inspect", help="what a frame says of itself", description="Print a frame's header.")
    p.add_argument("file", help="that begins with a frame")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=run_inspect)
    p = commands.add_parser(
        "verify", help="whether frames are whole", description="Check all of frames but the values."
    )
    p.add_argument("files", nargs="+", metavar="file", help="that is a frame")
    p.set_defaults(run=run_verify)
    p = commands.add_parser("warmup", help="compile the Numba engine's kernels", description=compiled)
    p.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="default: %(default)s")
    p.set_defaults(run=run_warmup)
    args = parser.parse_args(argv)
    if (args.run is run_told) != bool(args.told):
        parser.error("a command is needed, or flags are: see --help")
    try:
        args.run(args)
    except CodecError as e:
        print(f"{parser.prog}: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
