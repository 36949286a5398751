"""Arrows point down only: no module imports one that stands above it."""

import ast
from pathlib import Path

import codec

# from the bottom; modules of one line do not know each other
LAYERS = [
    {"errors"},
    {"specs"},
    {"core"},
    {"view", "pool"},
    {"metrics"},
    {"codebook"},
    {"frame"},
    {"encoding", "decoding"},
]
ROOT = Path(codec.__file__).parent


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "codec":
            names = node.module.split(".")[1:] or [a.name for a in node.names]
            yield names[0]
            if node.module == "codec":
                yield from (a.name for a in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name.split(".")[1] for a in node.names if a.name.startswith("codec."))


def test_arrows():
    place = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    files = {p.stem: p for p in ROOT.glob("*.py") if p.stem not in ("__init__", "_cffi")}
    assert set(files) == set(place)
    for name, path in files.items():
        for other in set(imports(path)) - {"_cffi"}:
            assert place[other] < place[name], f"{name} imports {other}"


def test_import_needs_numpy_and_cffi_alone():
    """Optional packages are imported where they are used."""
    allowed = {"numpy", "codec", "_cffi_backend", "cffi"}
    import subprocess
    import sys

    code = "import sys; old = set(sys.modules); import codec; print(*{m.split('.')[0] for m in set(sys.modules) - old})"
    out = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    foreign = {m for m in out.stdout.split() if m not in sys.stdlib_module_names and not m.startswith("_")}
    assert foreign <= allowed
