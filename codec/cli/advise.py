"""Command ``codec advise``."""

import argparse
import sys
from typing import Any, get_args

from codec._options import options
from codec.advisor.advise import advise
from codec.advisor.cost_model import Algorithm, link_of
from codec.cli.console import EXIT_CODES, add_json, add_threads, print_line, visible
from codec.errors import ArgumentError
from codec.files.arrays import arrays_of
from codec.tensors.wrapper import view

_SLOWEST = 1e4  # bits per second; a lower rate lacks its unit


def add_commands(commands: Any) -> None:
    """Add the parser of the command ``advise`` to the parsers of all commands."""
    p = commands.add_parser(
        "advise",
        help="find the fastest codec for a link",
        description="Measure gradients, and print which codec makes their all-reduce over a link fastest. "
        f"{EXIT_CODES}",
        usage="%(prog)s FILE [ARRAY ...] --link LINK [options]",  # argparse does not accept arrays after options
    )
    p.add_argument("file", help=".npz, .npy or .safetensors file with the gradients of a step")
    p.add_argument(
        "arrays",
        nargs="*",
        help="names of arrays to measure; default: all of float32, bfloat16 and float16, or of --dtype",
    )
    p.add_argument("--link", required=True, help="100mbit (megabits per second), 10Gbps, or bits per second")
    p.add_argument("--rtt", help="round trip between ranks, as ping measures it: 40ms, or seconds; default: 0.2ms")
    p.add_argument("--ranks", type=_ranks, default=4, help="number, or machines x ranks, as 2x8; default: %(default)s")
    p.add_argument("--algorithm", choices=get_args(Algorithm), help="default: two_shot; of 2 ranks all_gather")
    p.add_argument("--lossy", action="store_true", help="also consider lossy codecs")
    p.add_argument("--feedback", action="store_true", help="with error feedback: also consider Ternary and Sign")
    p.add_argument("--dtype", help="dtype of arrays that store bits, such as bfloat16 for uint16")
    add_threads(p)
    add_json(p)
    p.set_defaults(run=run_advise)


def _ranks(text: str) -> int | tuple[int, int]:
    """Convert 8, or 2x8, to an argument ``world_size=``."""
    machines, by, each = text.partition("x")
    try:
        return (int(machines), int(each)) if by else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of ranks nor machines x ranks, such as 2x8"
        ) from None


def run_advise(args: argparse.Namespace) -> int:
    """Print the advice of :func:`codec.advise` for the arrays of a file."""
    if (rate := link_of(args.link).bits_per_second) < _SLOWEST:
        raise ArgumentError(
            f"--link {args.link} is {rate:g} bits per second: write a unit, such as 100mbit for 100 megabits per second"
        )
    arrays = arrays_of(args.file, args.arrays, args.dtype)
    total = sum(x.nbytes for x in arrays.values()) / 1e6
    names = visible(", ".join(arrays)) or "nothing"
    print(f"measuring {names}: {total:.3g} MB", file=sys.stderr, flush=True)
    advice = advise(
        {name: view(x, args.dtype) for name, x in arrays.items()},
        args.link,
        rtt=args.rtt,
        world_size=args.ranks,
        lossy=args.lossy,
        feedback=args.feedback,
        options=options(threads=args.threads, algorithm=args.algorithm),
    )
    print_line(advice.to_json() if args.json else str(advice))
    return 0
