"""The command ``codec``, also ``python -m codec``.

``codec advise FILE --link 100mbit``: which codec pays for the gradients in a .npz, .npy or .safetensors file.
``codec inspect FRAME``, ``verify FRAME``: print the header of a frame in a file, or check all of it.
``codec warmup``: compile the Numba engine's kernels, in an image for example.
``codec --cflags --libs``: how to build C against the library in this package.
"""

import argparse
import json
import shlex
import sys
from dataclasses import fields
from typing import Any, get_args

import codec
from codec import _c
from codec._files import arrays_of, inspect_file, printable, verify_file
from codec._warmup import warmup
from codec.advisor.advise import advise, named
from codec.advisor.cost_model import Algorithm
from codec.errors import CodecError, FrameError

PROGRAM = "codec"


def run_advise(args: argparse.Namespace) -> int:
    """Print what :func:`codec.advise` advises for the arrays of a file."""
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
    return 0


def run_inspect(args: argparse.Namespace) -> int:
    """Print what :func:`codec.inspect` returns for a file."""
    try:
        info = inspect_file(args.file)
    except FrameError as e:
        e.of(args.file)
        raise
    told = {f.name: getattr(info, f.name) for f in fields(info)} | {"spec": named(info.spec), "ratio": info.ratio}
    print(json.dumps(told, indent=1) if args.json else "\n".join(f"{name:14} {value}" for name, value in told.items()))
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Check each file by :func:`codec.verify`, and return 1 if one of them is not a whole frame."""
    failed = 0
    for file in args.files:
        try:
            verify_file(file)
        except CodecError as e:
            failed = 1
            if isinstance(e, FrameError):
                e.of(file)
            print(f"{PROGRAM}: {e}", file=sys.stderr, flush=True)
        else:
            print(f"{printable(file)}: a whole frame", flush=True)
    return failed


def run_warmup(args: argparse.Namespace) -> int:
    """Compile the kernels of the Numba engine for dtypes."""
    warmup(dtypes=args.dtypes)
    return 0


def run_told(args: argparse.Namespace) -> int:
    """Print flags and folders for build tools, a line each, in the order of the arguments."""
    include, lib = _c.PACKAGE / "include", _c.PACKAGE / "lib"
    if not (include / "codec" / "codec.h").exists():
        raise CodecError(f"no C headers in {include}: they come with the installed package (pip install)")
    say = {
        "cflags": shlex.quote(f"-I{include}"),
        "libs": shlex.join([f"-L{lib}", "-lcodec", f"-Wl,-rpath,{lib}"]),  # found there at run time, too
        "pkgconfigdir": str(lib / "pkgconfig"),
        "cmakedir": str(lib / "cmake" / "codec"),
    }
    print(*(say[name] for name in args.told), sep="\n")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run a command, and return its exit code: 1 if it failed, with a line on stderr that says why."""
    parser: Any = argparse.ArgumentParser(prog=PROGRAM, description="Compression of tensors on the wire.")
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
    usage = "%(prog)s FILE [ARRAY ...] --link LINK [options]"  # arrays behind options would not be seen as such
    p = commands.add_parser("advise", help="which codec pays on a link", description=told, usage=usage)
    p.add_argument("file", help=".npz, .npy or .safetensors file with the gradients of a step")
    p.add_argument(
        "arrays",
        nargs="*",
        help="names of arrays to measure; left out: all of float32, bfloat16 and float16, or of --dtype",
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
    p.add_argument("file", help="that begins with a frame; - for standard input")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=run_inspect)
    p = commands.add_parser(
        "verify", help="whether frames are whole", description="Check all of frames but the values."
    )
    p.add_argument("files", nargs="+", metavar="file", help="that is a frame; - for standard input")
    p.set_defaults(run=run_verify)
    p = commands.add_parser("warmup", help="compile the Numba engine's kernels", description=compiled)
    p.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="default: %(default)s")
    p.set_defaults(run=run_warmup)
    args = parser.parse_args(argv)
    if (args.run is run_told) != bool(args.told):
        parser.error("a command is needed, or flags are: see --help")
    try:
        return args.run(args)
    except CodecError as e:
        print(f"{PROGRAM}: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
