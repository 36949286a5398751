"""Instructions in the loops of kernels, from their machine code: ``python bench/gpu/instructions.py``.

It needs CuPy with NVRTC, and nvdisasm (``pip install nvidia-cuda-nvdisasm``), but no GPU. A loop is listed with its
number of instructions if it has at least ``--least`` of them and reads shared memory. If it is unrolled for 8 rows of
128 values and has 640 instructions, these are 80 for a row, including those of branches that are rarely taken.
"""

import argparse
import re
import shutil
import subprocess
import tempfile
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from codec.engines.cuda import kernels

FAST = [f"{way}_lossless_fast<{size}>" for way in ("encode", "decode") for size in (2, 4)]
LABEL = re.compile(r"(\.L_x_\d+):")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,6}\*/\s+(.*?)\s*;")
BRANCH = re.compile(r"^(?:@!?U?P\d+ )?BRA .*`\((\.L_x_\d+)\)")


def nvdisasm() -> str:
    """Return the path of nvdisasm, on the search path or in its Python package."""
    if path := shutil.which("nvdisasm"):
        return path
    try:
        return str(next(f.locate() for f in files("nvidia-cuda-nvdisasm") or [] if f.name == "nvdisasm"))
    except (PackageNotFoundError, StopIteration):
        raise SystemExit("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm") from None


def disassemble(image: bytes) -> str:
    """Return the text of machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(image)
        return subprocess.run([nvdisasm(), "-c", file.name], capture_output=True, text=True, check=True).stdout


def loops(section: str, least: int) -> list[int]:
    """Return the numbers of instructions of the innermost loops of a section that read shared memory."""
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in section.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(code)
        elif instruction := INSTRUCTION.search(line):
            code.append(instruction[1])
    spans: list[tuple[int, int]] = []
    for end, text in enumerate(code):
        branch = BRANCH.match(text)
        begin = labels.get(branch[1], end) if branch else end
        body = " ".join(code[begin:end])
        # branches back from the end of the section join lanes that diverged: no loops
        if end - begin >= least and "LDS" in body and "ENDCOLLECTIVE" not in body:
            spans.append((begin, end + 1))
    inner = [(a, b) for a, b in spans if not any(a <= c and d <= b and (c, d) != (a, b) for c, d in spans)]
    return [b - a for a, b in inner]


def main() -> None:
    """Print a line for each kernel."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kernels", nargs="*", default=FAST)
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--least", type=int, default=400, help="instructions of a loop that is listed")
    given = parser.parse_args()
    for kernel in given.kernels:
        name = kernels.FILE_OF[kernel]
        file = kernels.FILES[name]
        code = kernels.compiled(name, (kernel,), given.arch)
        text = disassemble(code.image)
        sections = re.split(r"(?m)^//-+ (\.text\.\S+) +-+$", text)
        section = next(sections[i + 1] for i in range(1, len(sections), 2) if code.names[kernel] in sections[i])
        warps = file.threads // 32 * file.kernels[kernel]
        print(f"{kernel}: {warps} warps of a multiprocessor, loops of {loops(section, given.least)} instructions")


if __name__ == "__main__":
    main()
