"""Generate the cffi module from the public C headers, so that declarations exist only once.

Usage: ``python build.py OUTPUT_DIR HEADER...`` writes ``OUTPUT_DIR/_cffi.py``. The module is out-of-line and
in ABI mode, so that it works with any Python version and needs no compiler.
"""

import re
import sys
from pathlib import Path

import cffi


def declarations(header: str) -> str:
    """Remove everything that cffi cannot parse: comments, directives except integer constants, and attributes."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    text = re.sub(r"#ifndef CODEC_API\n.*?\n#endif\n#endif\n", "", text, flags=re.DOTALL)
    text = re.sub(r"#ifdef __cplusplus\n.*?#endif\n", "", text, flags=re.DOTALL)
    lines: list[str] = []
    for line in text.splitlines():
        constant = re.fullmatch(r"#define (\w+) (\d+)u?\s*", line)
        if constant:
            lines.append(f"#define {constant[1]} {constant[2]}")
        elif not line.startswith("#"):
            lines.append(line.replace("CODEC_API ", ""))
    return "\n".join(lines).replace("[CODEC_MAX_RANK]", "[8]")


def main(directory: str, *headers: str) -> None:
    """Write the module ``_cffi.py`` for these headers into a directory."""
    ffi = cffi.FFI()
    ffi.set_source("codec._c._cffi", None)
    ffi.cdef("\n".join(declarations(Path(h).read_text()) for h in headers))
    target = Path(directory, "_cffi.py")
    target.parent.mkdir(parents=True, exist_ok=True)
    ffi.emit_python_code(str(target))


if __name__ == "__main__":
    main(*sys.argv[1:])
