"""Count instructions in the loops of kernels, from their machine code: ``python bench/gpu/instructions.py``.

The script needs CuPy with NVRTC, and nvdisasm (``pip install nvidia-cuda-nvdisasm``), but no GPU. It lists each loop
that has at least ``--least`` instructions and reads shared memory. A loop of 640 instructions that is unrolled for 8
rows of 128 values has 80 instructions per row, including branches that are rarely taken.

Kernels of Quantize, Ternary, Float8, Truncate and TopK, and of Lossless with offsets or several planes in regions, have
loops with a branch for each option. For each loop over float32 values, the script prints the length of the shortest
path that loads or stores all values and, if the codec uses random bits, generates them: instructions per row of 128
values, excluding branches that are rarely taken.
"""

import argparse
import heapq
import re
import shutil
import subprocess
import tempfile
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import NamedTuple

from codec.engines.cuda import kernels


class Way(NamedTuple):
    """Path to find in a kernel's loops: rows of 128 values per iteration, and required counts by instruction prefix."""

    kernel: str
    what: str
    rows: int
    least: dict[str, int]


WAYS = (
    Way("encode_rows<6>", "groups of 64 to 256", 4, {"LDG.E.128": 4, "SHFL": 6, "IMAD.WIDE": 36}),
    Way("encode_rows<6>", "longer groups, without their scales", 4, {"LDG.E.128": 4, "IMAD.WIDE": 36}),
    Way("decode_rows<6>", "any groups", 8, {"STG.E.128": 8, "FFMA": 32}),
    Way("encode_rows<4>", "groups of 32 (MXFP8), of 64 to 256", 4, {"LDG.E.128": 4, "STG.E.64": 2, "SHFL": 4}),
    Way("decode_rows<4>", "groups of 32 (MXFP8), of 64 to 512", 8, {"STG.E.128": 8, "SHFL": 8}),
    Way("encode_rows<3>", "2 bits", 4, {"LDG.E.128": 4, "IMAD.WIDE": 34}),
    Way("decode_rows<3>", "2 bits", 8, {"STG.E.128": 8, "FMUL": 32}),
    Way("encode_truncate", "first cut", 1, {"LDG.E.128": 1, "STG.E.64": 1}),
    Way("encode_truncate", "pieces", 1, {"LDG.E.128": 1, "ATOMS": 8}),
    Way("encode_lossless_fast<2>", "offsets of rows and columns", 8, {"LDS": 32, "VIADDMNMX.U16x2": 16}),
    Way("encode_lossless_fast<4>", "offsets of rows and columns", 8, {"LDS": 32, "VIADDMNMX.U16x2": 16}),
    Way("decode_lossless_fast<2>", "offsets of rows and columns", 8, {"STG": 8, "VIADDMNMX.U16x2": 16}),
    Way("decode_lossless_fast<4>", "offsets of rows and columns", 8, {"STG": 8, "VIADDMNMX.U16x2": 16}),
    Way("encode_lossless_fast<4>", "planes in regions, first pass", 1, {"LDG.E.64": 2, "VOTE": 6, "LDS": 4}),
    Way("encode_lossless_fast<4>", "pruned raw planes", 1, {"LDG.E.64": 2, "STS.U8": 12, "STG.E": 3}),
    Way("decode_lossless<4>", "pruned raw planes", 1, {"STG.E.128": 1, "LDG": 7}),
    Way("decode_truncate", "values that keep all pieces", 1, {"STG.E.128": 1, "LD.E": 8}),
    Way("encode_topk", "list candidates, of a row with none", 1, {"LDG.E.128": 1, "VOTE": 1}),
    Way("encode_topk", "list candidates, of a row with some", 1, {"LDG.E.128": 1, "VOTE": 5}),
    Way("encode_topk", "histogram of a digit", 1, {"LDG.E.128": 1, "ATOMS": 4}),
)
FAST = [f"{way}_lossless_fast<{size}>" for way in ("encode", "decode") for size in (2, 4)]
LABEL = re.compile(r"(\.L_x_\d+):")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,6}\*/\s+(.*?)\s*;")
BRANCH = re.compile(r"^(?:@!?U?P\w+ )?BRA(?:\.\S+)? .*`\((\.L_x_\d+)\)")


def nvdisasm() -> str:
    """Return the path of the program nvdisasm, from PATH or from its Python package."""
    if path := shutil.which("nvdisasm"):
        return path
    try:
        return str(next(f.locate() for f in files("nvidia-cuda-nvdisasm") or [] if f.name == "nvdisasm"))
    except (PackageNotFoundError, StopIteration):
        raise SystemExit("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm") from None


def disassemble(image: bytes) -> str:
    """Disassemble machine code (a cubin) with nvdisasm, and return the text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(image)
        return subprocess.run([nvdisasm(), "-c", file.name], capture_output=True, text=True, check=True).stdout


def parse(section: str) -> tuple[dict[str, int], list[str]]:
    """Return the labels of a section, as instruction indices by name, and the section's instructions."""
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in section.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(code)
        elif instruction := INSTRUCTION.search(line):
            code.append(instruction[1])
    return labels, code


def spans(labels: dict[str, int], code: list[str], least: int) -> list[tuple[int, int]]:
    """Return loops of at least `least` instructions, each as (first instruction, branch back to it)."""
    found: list[tuple[int, int]] = []
    for end, text in enumerate(code):
        branch = BRANCH.match(text)
        begin = labels.get(branch[1], end) if branch else end
        # A backward branch around ENDCOLLECTIVE is no loop: it makes diverged lanes converge.
        if end - begin >= least and not any("ENDCOLLECTIVE" in code[i] for i in range(begin, end)):
            found.append((begin, end))
    return found


def innermost(found: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return those of the loops `found` that contain no other loop."""
    return [(a, b) for a, b in found if not any(a <= c and d <= b and (c, d) != (a, b) for c, d in found)]


def loops(section: str, least: int) -> list[int]:
    """Return the instruction counts of a section's innermost loops that read shared memory."""
    labels, code = parse(section)
    found = [(a, b) for a, b in spans(labels, code, least) if "LDS" in " ".join(code[a:b])]
    return [b + 1 - a for a, b in innermost(found)]


def followers(labels: dict[str, int], code: list[str], i: int) -> list[int]:
    """Return the instructions that may follow instruction i, ignoring calls and warps whose lanes have diverged."""
    branch, text = BRANCH.match(code[i]), code[i].split()
    if "CALL" in code[i] or text[0] in ("EXIT", "RET.REL.NODEC"):
        return []
    if not branch or "BRA.DIV" in code[i]:
        return [i + 1]
    always = text[0] == "BRA" and text[1].startswith("`")
    return [labels[branch[1]], *([] if always else [i + 1])]


def shortest(labels: dict[str, int], code: list[str], span: tuple[int, int], least: dict[str, int]) -> int | None:
    """Return the length of the shortest path through a loop that contains each instruction in `least` at least as often
    as given there; None if there is no such path.
    """

    def counted(i: int, counts: tuple[int, ...]) -> tuple[int, ...]:
        operation = re.sub(r"^@!?U?P\w+ ", "", code[i])
        return tuple(min(n, c + operation.startswith(o)) for (o, n), c in zip(least.items(), counts, strict=True))

    begin, end = span
    start = begin, counted(begin, (0,) * len(least))
    best, heap = {start: 1}, [(1, start)]
    while heap:
        n, (i, counts) = heapq.heappop(heap)
        if i == end and counts == tuple(least.values()):
            return n
        for j in followers(labels, code, i):
            if i < j <= end and n + 1 < best.get(state := (j, counted(j, counts)), n + 2):
                best[state] = n + 1
                heapq.heappush(heap, (n + 1, state))
    return None


def ways(section: str, way: Way) -> list[float]:
    """Return the instructions per row on the shortest paths through innermost loops, in ascending order."""
    labels, code = parse(section)
    found = {span: shortest(labels, code, span, way.least) for span in spans(labels, code, 60)}
    return sorted(n / way.rows for span in innermost([s for s, n in found.items() if n]) if (n := found[span]))


def section_of(kernel: str, arch: str) -> str:
    """Compile a kernel, and return its machine code as disassembled text."""
    code = kernels.compiled(kernels.KERNELS[kernel].file, (kernel,), arch)
    sections = re.split(r"(?m)^//-+ (\.text\.\S+) +-+$", disassemble(code.image))
    return next(sections[i + 1] for i in range(1, len(sections), 2) if code.names[kernel] in sections[i])


def main() -> None:
    """Print a line for each kernel, and for each path."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kernels", nargs="*", default=[*dict.fromkeys([*FAST, *(way.kernel for way in WAYS)])])
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--least", type=int, default=400, help="instructions of a loop that is listed")
    given = parser.parse_args()
    for kernel in given.kernels:
        section, about = section_of(kernel, given.arch), kernels.KERNELS[kernel]
        warps = about.threads // 32 * about.resident
        if kernel in FAST:
            listed = f"loops of {loops(section, given.least)} instructions"
            print(f"{kernel}: {warps} warps of a multiprocessor, {listed}")
        for way in WAYS:
            if way.kernel == kernel:
                counts = ", ".join(f"{n:.0f}" for n in ways(section, way))
                print(f"{kernel}, {way.what}: {warps} warps of a multiprocessor, instructions a row: {counts}")


if __name__ == "__main__":
    main()
