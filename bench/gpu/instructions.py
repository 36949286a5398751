"""Instructions of the CUDA engine's loops, counted in their machine code. Needs nvdisasm, but no GPU.

    pip install nvidia-cuda-nvdisasm
    python bench/gpu/instructions.py                              # loops over whole rows
    python bench/gpu/instructions.py --all "encode_truncate"      # every loop of a kernel

For a row of 128 values, `least` counts the shortest path through the loop that stores something, and `most` all
instructions of the loop, including rare ones (literals of escapes, ends of rows). A warp issues one instruction per
cycle on one of four schedulers of a multiprocessor. `slots` is the number of instructions per row at which a kernel
reaches 80% or 70% of a copy's speed on an H200 (132 multiprocessors, 1.98 GHz, 4.15 TB/s). With fewer instructions,
including digests and work per block, memory is the limit.
"""

import argparse
import functools
import json
import operator
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from codec.engines.cuda import kernels

ROW = 128  # values per row
SLOTS = 132 * 4 * 1.98e9  # instructions per second of an H200
COPY = 4.15e12  # bytes per second that a copy reads and writes


class Hot(NamedTuple):
    """Loop over whole rows."""

    holds: str  # source text; the loop is the smallest one that contains it
    rows: float  # rows per iteration, after unrolling
    nbytes: float  # bytes per value, in the tensor and in a typical frame
    times: int = 1  # least number of instructions from `holds`
    through: tuple[str, ...] = ()  # source text on all paths of values
    stores: int = 1  # stores on the path


_PAIR, _FOUR, _LOADED = "= pair[high >>", "walk_four<CODEC>", "w = *global("
_EIGHT, _LARGEST, _SLACK = "after = end - i < WARP_STEP", "values_at_quads<4>(dtype, source, first + i", "ea == 255"
_HALF, _SINGLE, _CUT = 2 + 1.33, 4 + 3.33, 4 + 12 + 1.6  # with AdamW's state
HOT = (
    ("encode_lossless<2>", "", Hot(_LOADED, 4, _HALF)),
    ("encode_lossless<4>", "", Hot(_LOADED, 2, _SINGLE)),
    ("decode_lossless<2>", "", Hot(_PAIR, 4, _HALF, 8, (), 4)),
    ("decode_lossless<4>", "", Hot(_PAIR, 2, _SINGLE, 6, (), 2)),
    ("encode_rows<2>", "", Hot("__ballot_sync(FULL, there", 4, 4 + 1 / 8, 16)),
    ("encode_rows<3>", "codes", Hot(_EIGHT, 2, 4 + 2 / 8, 1, ("return (int)x", "PHILOX_M0"))),
    ("encode_rows<4>", "scales", Hot(_LARGEST, 4, 4 + 1)),
    ("encode_rows<4>", "codes", Hot(_EIGHT, 2, 4 + 1, 1, ("values_at_quads<8>",))),
    ("encode_rows<5>", "both", Hot(_EIGHT, 2, 4 + 4.25 / 8)),
    ("encode_rows<6>", "scales", Hot(_LARGEST, 4, 4 + 4.5 / 8)),
    ("encode_rows<6>", "codes", Hot(_EIGHT, 2, 4 + 4.5 / 8, 1, ("return (int)x",))),
    ("decode_rows<2>", "", Hot(_FOUR, 2, 4 + 1 / 8, 1, (), 2)),
    ("decode_rows<3>", "", Hot(_FOUR, 2, 4 + 2 / 8, 1, (), 2)),
    ("decode_rows<4>", "", Hot(_FOUR, 2, 4 + 1, 1, (), 2)),
    ("decode_rows<5>", "", Hot(_FOUR, 2, 4 + 4.25 / 8, 1, (), 2)),
    ("decode_rows<6>", "", Hot(_FOUR, 2, 4 + 4.5 / 8, 1, (), 2)),
    ("reduce_rows<4>", "of 8 frames", Hot("round_float(e &", 4 / 8, 8 * 1 + 4, 1, ("round_float(e &",))),
    ("preprocess", "exponents of A", Hot("exponents |=", 1, _CUT, 1, ("__fsqrt_rn(x)", "exponents |="))),
    ("encode_truncate", "symbols", Hot("sums.any |=", 1, _CUT, 1, (_SLACK, "on_circle(o->eigh"))),
    ("encode_truncate", "coding", Hot("symbol[32 * r + lane]", 1, _CUT)),
    (
        "encode_truncate",
        "pieces",
        Hot("to.piece[i] +", 1, _CUT, 1, (_SLACK, "atomicOr(word, low)", "atomicOr(word + 1")),
    ),
    ("decode_truncate", "symbols", Hot(_PAIR, 1, _CUT, 4, (_SLACK, "on_circle(o->eigh", _PAIR))),
    (
        "decode_truncate",
        "pieces",
        Hot("p->bit[i] +", 1, _CUT, 1, (_SLACK, "global(s.words)[i]", "global((uint4 *)sink")),
    ),
)
_SHOWN = ("kernel", "line", "source", "least", "most")


class Instruction(NamedTuple):
    text: str
    line: str  # "file:number" in the innermost function
    follows: tuple[int, ...]  # numbers of instructions that may follow


class Loop(NamedTuple):
    kernel: str
    line: str
    source: str
    least: int
    most: int
    header: int
    inside: frozenset[int]  # numbers of its instructions


def nvdisasm() -> str:
    """Return the path of nvdisasm: from PATH, or from a package of NVIDIA."""
    packages = Path(sysconfig.get_path("purelib")) / "nvidia"
    found = shutil.which("nvdisasm") or next(map(str, packages.glob("*/bin/nvdisasm")), None)
    if found is None:
        sys.exit("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    return found


def disassembled(kernel: str, arch: str) -> list[Instruction]:
    """Return a kernel's instructions, followed by those of functions that it calls."""
    code = kernels.compiled(kernels.FILE_OF[kernel], (kernel,), arch, ("-lineinfo",))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.image)
        file.flush()
        said = subprocess.run([nvdisasm(), "-c", "-g", file.name], check=True, capture_output=True, text=True).stdout
    texts: list[str] = []
    lines: list[str] = []
    labels: dict[str, int] = {}
    line = ""
    for text in said.splitlines():
        if mark := re.match(r'\s*//## File "(.*)", line (\d+)', text):
            line = f"{within(Path(mark[1]))}:{mark[2]}"
        elif label := re.match(r"(\.L_x_\d+):", text):
            labels[label[1]] = len(texts)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", text):
            texts.append(instruction[1])
            lines.append(line)
    return [Instruction(t, lines[i], follows(t, i, labels)) for i, t in enumerate(texts)]


def follows(text: str, i: int, labels: dict[str, int]) -> tuple[int, ...]:
    """Return the instructions that may follow instruction i; a call returns."""
    guard, opcode = re.match(r"(@!?U?P\w+\s+)?(\S+)", text).groups()  # type: ignore[union-attr]
    target = re.search(r"\((\.L_x_\d+)\)", text)
    if opcode.startswith("BRA") and opcode != "BRA.DIV" and target:  # BRA.DIV is for diverged warps
        conditional = guard or re.match(r"\S+\s+!?U?P\d", text)
        return (labels[target[1]], i + 1) if conditional else (labels[target[1]],)
    if opcode in ("EXIT", "RET.REL.NODEC", "BRX") and not guard:
        return ()
    return (i + 1,)


def components(inside: set[int], code: Sequence[Instruction]) -> Iterator[set[int]]:
    """Return strongly connected components of several instructions (Tarjan's algorithm, iterative)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on: set[int] = set()
    for root in sorted(inside):
        work = [(root, iter(code[root].follows))] if root not in index else []
        while work:
            node, rest = work[-1]
            if node not in index:
                index[node] = low[node] = len(index)
                stack.append(node)
                on.add(node)
            for other in rest:
                if other in inside and other not in index:
                    work.append((other, iter(code[other].follows)))
                    break
                if other in on:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    found: set[int] = set()
                    while node not in found:
                        found.add(stack.pop())
                    on -= found
                    if len(found) > 1:
                        yield found


def shortest(
    header: int, inside: set[int], code: Sequence[Instruction], through: Sequence[str] = (), stores: int = 1
) -> int:
    """Return the length of the shortest cycle that passes the given lines and stores; None if there is none."""
    counts = {i for i in inside if " STG" in f" {code[i].text}"}
    passes = {i: sum((wanted in source_of(code[i].line)) << k for k, wanted in enumerate(through)) for i in inside}
    every = functools.reduce(operator.or_, passes.values()), min(stores, len(counts))
    reached = edge = {(header, passes[header], int(header in counts))}
    steps = 0
    while edge:
        steps += 1
        after: set[tuple[int, int, int]] = set()
        for node, passed, stored in edge:
            for other in code[node].follows:
                if other == header and (passed, stored) == every:
                    return steps
                if other in inside and other != header:
                    after.add((other, passed | passes[other], min(stored + (other in counts), every[1])))
        edge = after - reached
        reached = reached | after
    return len(inside)


def loops(kernel: str, code: Sequence[Instruction], inside: set[int] | None = None) -> Iterator[Loop]:
    """Return all loops, outer ones first. A loop begins at its entry."""
    into: dict[int, set[int]] = {}
    for i, instruction in enumerate(code):
        for other in instruction.follows:
            into.setdefault(other, set()).add(i)
    for found in components(set(range(len(code))) if inside is None else inside, code):
        header = min((i for i in found if into.get(i, set()) - found), default=min(found))
        line = code[header].line
        yield Loop(kernel, line, source_of(line), shortest(header, found, code), len(found), header, frozenset(found))
        yield from loops(kernel, code, found - {header})


def within(path: Path) -> Path:
    """Return a source's path within its folder, such as ``rows/decode.cu``."""
    for folder in kernels.folders():
        if path.is_relative_to(folder):
            return path.relative_to(folder)
    return path


@functools.cache
def source_of(line: str) -> str:
    """Return the text of a line of a source, given as ``"rows/decode.cu:12"``; empty for other files."""
    name, number = line.rsplit(":", 1)
    for folder in kernels.folders():
        if (folder / name).is_file():
            return (folder / name).read_text().splitlines()[int(number) - 1].strip()
    return ""


def slots(nbytes: float, fraction: float) -> float:
    """Return the instructions per row that keep a kernel at `fraction` of a copy's speed."""
    return SLOTS * ROW * nbytes / COPY / fraction


def hot(kernel: str, what: str, about: Hot, code: Sequence[Instruction], found: Sequence[Loop]) -> dict[str, Any]:
    """Return instructions per row of a kernel's loop over whole rows, and the slots for them."""
    held = {i for i, instruction in enumerate(code) if about.holds in source_of(instruction.line)}
    loop = min((loop for loop in found if len(loop.inside & held) >= about.times), key=lambda loop: loop.most)
    least = shortest(loop.header, set(loop.inside), code, about.through, about.stores)
    return {
        "kernel": kernel,
        "what": what,
        "least": least / about.rows,
        "most": loop.most / about.rows,
        "slots at 80%": slots(about.nbytes, 0.8),
        "slots at 70%": slots(about.nbytes, 0.7),
        "line": loop.line,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "kernels", nargs="*", default=list(dict.fromkeys(kernel for kernel, *_ in HOT)), help="names of kernels"
    )
    parser.add_argument("--arch", default="sm_90", help="architecture of the GPU (sm_90)")
    parser.add_argument(
        "--all", action="store_true", help="all loops, in instructions per iteration instead of per row"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.all and (other := sorted(set(args.kernels) - {kernel for kernel, *_ in HOT})):
        parser.error(f"no loop over whole rows is known of {', '.join(other)}: see them by --all")
    rows: list[dict[str, Any]] = []
    for kernel in args.kernels:
        code = disassembled(kernel, args.arch)
        found = sorted(loops(kernel, code), key=lambda loop: -loop.most)
        if args.all:
            rows += [dict(zip(_SHOWN, loop, strict=False)) for loop in found]
        else:
            rows += [hot(name, what, about, code, found) for name, what, about in HOT if name == kernel]
    if args.json:
        print(json.dumps(rows))
        return
    if not args.all:
        print(f"{'a row of 128 values':36}{'least':>7}{'most':>7}{'slots at 80%':>14}{'70%':>7}")
    for row in rows:
        if args.all:
            print(f"{row['kernel']:22}{row['least']:7}{row['most']:7}  {row['line']:26}{row['source'][:80]}")
        else:
            print(
                f"{row['kernel']:20}{row['what']:16}{row['least']:7.0f}{row['most']:7.0f}{row['slots at 80%']:14.0f}"
                f"{row['slots at 70%']:7.0f}  {row['line']}"
            )


if __name__ == "__main__":
    main()
