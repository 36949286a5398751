"""Commands ``codec warmup`` and ``codec completion``, and the flags for programs that use the C library."""

import argparse
import importlib
import shlex
from typing import Any

from codec import _c
from codec._warmup import warmup
from codec.cli.console import EXIT_CODES
from codec.errors import CodecError, EngineError

_FLAGS = {
    "cflags": "compiler flags for programs that use the C library",
    "libs": "linker flags for programs that use the C library",
    "pkgconfigdir": "folder of codec.pc, for PKG_CONFIG_PATH",
    "cmakedir": "folder of the CMake package, for -Dcodec_DIR=",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that are used without a command, such as ``--cflags``, to the program's parser."""
    for name, of in _FLAGS.items():
        parser.add_argument(f"--{name}", dest="flags", action="append_const", const=name, help=f"print {of}")


def add_commands(commands: Any) -> None:
    """Add the parsers of the commands ``warmup`` and ``completion`` to the parsers of all commands."""
    p = commands.add_parser(
        "warmup",
        help='compile the loops of engine="numba" ahead of use',
        description='Compile the loops of engine="numba" ahead of their first use, and cache them on disk. Only '
        "programs that choose this engine need it, such as those with a quantizer of their own written in Python "
        "(new-kernel.md). The default engine is compiled already. The package numba must be installed; compiling "
        f"takes a minute or more. {EXIT_CODES}",
    )
    p.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], help="dtypes of tensors; default: float32 bfloat16"
    )
    p.set_defaults(run=run_warmup)
    p = commands.add_parser(
        "completion",
        help="print a script that completes commands in a shell",
        description='Print a script that completes commands and options, such as eval "$(codec completion bash)". The '
        f"package shtab must be installed. {EXIT_CODES}",
    )
    p.add_argument("shell", choices=("bash", "zsh", "fish", "tcsh"))
    p.set_defaults(run=run_completion)


def run_warmup(args: argparse.Namespace) -> int:
    """Run ``codec warmup``: compile the kernels of the Numba engine for the given dtypes."""
    warmup(dtypes=args.dtypes)
    return 0


def run_completion(args: argparse.Namespace) -> int:
    """Run ``codec completion``: print the completion script of a shell."""
    try:
        shtab: Any = importlib.import_module("shtab")
    except ImportError:
        raise EngineError("codec completion needs shtab, which is not installed: pip install shtab") from None
    if args.shell not in shtab.SUPPORTED_SHELLS:
        raise EngineError(f"shtab {shtab.__version__} does not support {args.shell}: pip install -U shtab")
    print(shtab.complete(args.parser, shell=args.shell))
    return 0


def run_flags(args: argparse.Namespace) -> int:
    """Print flags and folders for build tools, one per line, in the order of the arguments."""
    include, lib = _c.PACKAGE / "include", _c.PACKAGE / "lib"
    if not (include / "codec" / "codec.h").exists():
        raise CodecError(f"{include} has no C headers: install the package with pip, which installs the headers")
    values = {
        "cflags": shlex.quote(f"-I{include}"),
        "libs": shlex.join([f"-L{lib}", "-lcodec", f"-Wl,-rpath,{lib}"]),  # rpath: found at run time, too
        "pkgconfigdir": str(lib / "pkgconfig"),
        "cmakedir": str(lib / "cmake" / "codec"),
    }
    print(*(values[name] for name in args.flags), sep="\n")
    return 0
