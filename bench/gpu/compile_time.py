"""Seconds to compile each kernel of the CUDA engine with NVRTC, and to load it from the cache. Needs no GPU.

python bench/gpu/compile_time.py --arch sm_90
"""

import argparse
import json
import os
import tempfile
import time
from typing import Any

from codec.engines.cuda import kernels


def compiling(arch: str) -> list[dict[str, Any]]:
    """Return, for each kernel, the seconds of compiling it and of loading it from disk."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CODEC_CACHE_DIR"] = folder
        for kernel in kernels.KERNELS.values():
            seconds: list[float] = []
            for _ in range(2):
                start = time.perf_counter()
                kernels.compiled(kernel.file, kernel.compiled_with(), arch)
                seconds.append(time.perf_counter() - start)
            rows.append({"kernel": kernel.name, "compiled": seconds[0], "cached": seconds[1]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90", help="architecture of the GPU (sm_90)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = compiling(args.arch)
    if args.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print(f"{row['kernel']:24}{row['compiled']:8.2f} s{1e3 * row['cached']:8.2f} ms from the cache")


if __name__ == "__main__":
    main()
