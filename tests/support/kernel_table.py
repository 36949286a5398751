"""Generate native/cuda_api/src/kernels.h, the C host's table of kernels, from codec/engines/cuda/kernels.py.

``PYTHONPATH=tests python -m support.kernel_table --write`` writes the file; without ``--write``, the command prints it.
"""

import re
import sys

from codec.engines.cuda import kernels
from support.cuda_c import API

PATH = API / "src/kernels.h"
# Kernels in native/cuda_api/kernels: threads per block
OWN = {"store_bytes": 256, "finish_encode": 128, "open_frames": 256, "finish_decode": 128}
OTHER = re.compile("gather|check_finite|choose_topk|reduce_rows")  # kernels that the C host does not launch
LIMITS = {
    "WARPS": "warps of most CTAs; a grid has a CTA for so many blocks of values",
    "ELEMENTWISE_VALUES": "values for each CTA of elementwise kernels",
    "ELEMENTWISE_BLOCKS": "maximum CTAs of elementwise kernels for each multiprocessor",
    "OTHER_BLOCKS": "maximum CTAs per multiprocessor of kernels that choose or write frame headers",
    "MAX_GRID_Y": "CUDA's limit of a grid's second dimension",
    "MAX_IDLE": "maximum CTAs of a launch that find no work",
    "MAX_SCRATCH": "maximum bytes of scratch memory of a call",
}
TEXT = """\
/*
 * kernels.h - tables of the kernels in the library: threads of a CTA, and CTAs that are resident on a multiprocessor.
 *
 * Written by tests/support/kernel_table.py from codec/engines/cuda/kernels.py, which decides.
 *
 * X(identifier, name expression for NVRTC, threads, resident). images.py reads the expressions of both tables from
 * here, in this order.
 */
#ifndef CODEC_CUDA_KERNELS_H
#define CODEC_CUDA_KERNELS_H

{launched}

/* Kernels that the library itself does not launch. Other host parts get them from codec_cuda_code_for. */
{others}

enum kernel {{
#define X(identifier, name, threads, resident) identifier,
	CODEC_CUDA_KERNELS(X)
#undef X
		NKERNELS
}};

{limits}

#endif
"""


def text() -> str:
    """Return the contents of kernels.h."""
    rows = [(name, threads, 1) for name, threads in OWN.items()]
    for file in kernels.FILES.values():
        rows += [(name, file.threads, file.kernels[name]) for name in sorted(file.kernels)]
    others = [row for row in rows if OTHER.match(row[0])]
    limits = [(f"#define {name} {getattr(kernels, name)}", what) for name, what in LIMITS.items()]
    width = max(len(define) for define, _ in limits)
    return TEXT.format(
        launched=_macro("CODEC_CUDA_KERNELS", [row for row in rows if row not in others]),
        others=_macro("CODEC_CUDA_OTHER_KERNELS", others),
        limits="\n".join(f"{define:{width}} /* {what} */" for define, what in limits),
    )


def _macro(name: str, rows: list[tuple[str, int, int]]) -> str:
    """Return the text of an X macro: `name`(X) expands to X(identifier, kernel, threads, resident) per kernel."""
    lines = [f"#define {name}(X)"]
    for kernel, threads, resident in rows:
        identifier = kernel.replace("<", "_").rstrip(">").upper()
        lines.append(f'        X({identifier}, "{kernel}", {threads}, {resident})')
    padded = [f"{line:119}\\" for line in lines[:-1]] + lines[-1:]
    return "\n".join(line.replace(" " * 8, "\t", 1) if line.startswith(" ") else line for line in padded)


if __name__ == "__main__":
    if "--write" in sys.argv:
        PATH.write_text(text())
    else:
        print(text(), end="")
