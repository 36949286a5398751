"""The command ``codec``, also ``python -m codec``.

``codec advise FILE --link 100mbit``: find the fastest codec for the gradients in a .npz, .npy or .safetensors file.
``codec inspect FRAME``, ``codec verify FRAME``: print the header of a frame in a file, or check the frame. FRAME may be
the folder of an :class:`codec.ActivationDelta` or an update of weights, too.
``codec delta OLD NEW -o UPDATE``, ``codec apply OLD UPDATE ... -o NEW``, ``codec compose OLD UPDATE ... -o UPDATE``:
write the update of weights between two .safetensors files, apply updates, or make one of a chain.
``codec warmup``: compile the Numba engine's kernels, for example when a container image is built.
``codec --cflags --libs``: print compiler and linker flags for programs that use the C library of this package.
"""

import argparse
import json
import shlex
import sys
from dataclasses import asdict, fields
from typing import Any, get_args

import codec
from codec import _c
from codec._files import arrays_of, inspect_file, printable, verify_file
from codec._update_commands import add_commands, is_update, update_entries, verify_update
from codec._warmup import warmup
from codec.advisor.advise import advise, named
from codec.advisor.cost_model import Algorithm
from codec.errors import CodecError, FrameError, StateError
from codec.stateful.activation.store_info import inspect_store, is_store

PROGRAM = "codec"


def run_advise(args: argparse.Namespace) -> int:
    """Print the advice of :func:`codec.advise` for the arrays of a file."""
    arrays = arrays_of(args.file, args.arrays, args.dtype)
    total = sum(x.nbytes for x in arrays.values()) / 1e6
    print(f"measuring {', '.join(arrays) or 'nothing'}: {total:.3g} MB", file=sys.stderr, flush=True)
    advice = advise(
        {name: codec.view(x, args.dtype) for name, x in arrays.items()},
        args.link,
        rtt=args.rtt,
        world_size=args.ranks,
        lossy=args.lossy,
        feedback=args.feedback,
        options=codec.options(threads=args.threads, algorithm=args.algorithm),
    )
    print(advice.to_json() if args.json else advice)
    return 0


def run_inspect(args: argparse.Namespace) -> int:
    """Print what :func:`codec.inspect` returns for a file, or :func:`codec.inspect_store` for a folder."""
    entries: dict[str, Any]
    if is_store(args.file):
        entries = asdict(inspect_store(args.file))
    elif is_update(args.file):
        entries = update_entries(args.file)
    else:
        try:
            info = inspect_file(args.file)
        except FrameError as e:
            e.of(args.file)
            raise
        found = {f.name: getattr(info, f.name) for f in fields(info)}
        entries = found | {"spec": named(info.spec), "ratio": info.ratio}
    print(
        json.dumps(entries, indent=1)
        if args.json
        else "\n".join(f"{name:14} {value}" for name, value in entries.items())
    )
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Verify files by :func:`codec.verify`, and folders by :func:`codec.inspect_store`. Return 1 if one is damaged."""
    failed = 0
    for file in args.files:
        try:
            verified = verify(file)
        except CodecError as e:
            failed = 1
            if isinstance(e, FrameError):
                e.of(file)
            print(f"{PROGRAM}: {e}", file=sys.stderr, flush=True)
        else:
            print(f"{printable(file)}: {verified}", flush=True)
    return failed


def verify(file: str) -> str:
    """Return a line about a frame or a folder of activations. Raise CodecError if it is damaged."""
    if is_update(file):
        return verify_update(file)
    if not is_store(file):
        verify_file(file)
        return "a whole frame"
    info = inspect_store(file, verify=True)
    if info.damaged:
        raise StateError(f"{printable(file)}: {info.damaged} of {info.samples} samples are damaged")
    return f"{info.samples} samples, all whole"


def run_warmup(args: argparse.Namespace) -> int:
    """Compile the kernels of the Numba engine for dtypes."""
    warmup(dtypes=args.dtypes)
    return 0


def run_flags(args: argparse.Namespace) -> int:
    """Print flags and folders for build tools, a line each, in the order of the arguments."""
    include, lib = _c.PACKAGE / "include", _c.PACKAGE / "lib"
    if not (include / "codec" / "codec.h").exists():
        raise CodecError(f"no C headers in {include}: they come with the installed package (pip install)")
    values = {
        "cflags": shlex.quote(f"-I{include}"),
        "libs": shlex.join([f"-L{lib}", "-lcodec", f"-Wl,-rpath,{lib}"]),  # also used at run time
        "pkgconfigdir": str(lib / "pkgconfig"),
        "cmakedir": str(lib / "cmake" / "codec"),
    }
    print(*(values[name] for name in args.flags), sep="\n")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run a command, and return its exit code: 0, or 1 if the command failed, with an error message on stderr."""
    parser: Any = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Compression of tensors on the wire.",
        epilog="python -m codec.run --help: run a training script with compressed gradients",
    )
    for name, of in {
        "cflags": "compiler flags for programs that use the C library",
        "libs": "linker flags for programs that use the C library",
        "pkgconfigdir": "folder of codec.pc, for PKG_CONFIG_PATH",
        "cmakedir": "folder of the CMake package, for -Dcodec_DIR=",
    }.items():
        parser.add_argument(f"--{name}", dest="flags", action="append_const", const=name, help=f"print {of}")
    parser.add_argument("--version", action="version", version=codec.__version__)
    parser.set_defaults(run=run_flags)
    commands = parser.add_subparsers(metavar="command")
    measured = "Measure gradients, and print which codec makes their all-reduce over a link fastest."
    compiled = (
        'Compile the loops of engine="numba" ahead of their first use, and cache them on disk. Only programs that '
        "choose this engine need it, such as those with a quantizer of their own written in Python "
        "(docs/new-kernel.md). The default engine is compiled already. The package numba must be installed; compiling "
        "takes a minute or more."
    )
    usage = "%(prog)s FILE [ARRAY ...] --link LINK [options]"  # argparse does not accept arrays after options
    p = commands.add_parser("advise", help="find the fastest codec for a link", description=measured, usage=usage)
    p.add_argument("file", help=".npz, .npy or .safetensors file with the gradients of a step")
    p.add_argument(
        "arrays",
        nargs="*",
        help="names of arrays to measure; default: all of float32, bfloat16 and float16, or of --dtype",
    )
    p.add_argument("--link", required=True, help="100mbit, 10Gbps, or bits per second")
    p.add_argument("--rtt", help="round trip between ranks, as ping measures it: 40ms, or seconds; default: 0.2ms")
    p.add_argument("--ranks", type=int, default=4, help="default: %(default)s")
    p.add_argument("--algorithm", choices=get_args(Algorithm), help="default: two_shot; of 2 ranks all_gather")
    p.add_argument("--lossy", action="store_true", help="also consider lossy codecs")
    p.add_argument("--feedback", action="store_true", help="with error feedback: also consider Ternary and Sign")
    p.add_argument("--threads", type=int, help="threads that encode and decode; default: as many as pay")
    p.add_argument("--dtype", help="dtype of arrays that store bits, such as bfloat16 for uint16")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=run_advise)
    p = commands.add_parser("inspect", help="print the header of a frame", description="Print a frame's header.")
    p.add_argument(
        "file", help="file that begins with a frame, - for standard input, update of weights, or folder of activations"
    )
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=run_inspect)
    p = commands.add_parser(
        "verify", help="check that frames are valid", description="Check frames without decoding their values."
    )
    p.add_argument(
        "files",
        nargs="+",
        metavar="file",
        help="frame, - for standard input, update of weights, or folder of activations",
    )
    p.set_defaults(run=run_verify)
    add_commands(commands)
    p = commands.add_parser("warmup", help='compile the loops of engine="numba" ahead of use', description=compiled)
    p.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], help="dtypes of tensors; default: float32 bfloat16"
    )
    p.set_defaults(run=run_warmup)
    args = parser.parse_args(argv)
    if args.run is run_flags and not args.flags:
        parser.print_help()
        return 0
    if args.run is not run_flags and args.flags:
        parser.error("give a command or flags such as --cflags, not both: see --help")
    try:
        return args.run(args)
    except CodecError as e:
        print(f"{PROGRAM}: {e}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
