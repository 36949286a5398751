"""Imports go one way: a package imports only packages below it."""

import ast
import re
from pathlib import Path

import codec

# Packages and modules of `codec`, from the bottom. Those in one line do not import each other. `_c` itself, which only
# finds the compiled package, is below all.
LAYERS = [
    {"errors"},
    {"arguments", "_ownership"},
    {"specs"},
    {"_c"},
    {"tensors"},
    {"optimizers"},
    {"_call"},
    {"codebook", "inspection"},
    {"engines"},
    {"encoding", "decoding"},
    {"batch", "advisor", "_files", "_warmup"},
    {"stateful"},
    {"torch", "__main__"},
]
ENGINES = [{"request"}, {"blockwise"}, {"native"}, {"numba", "cuda"}]  # within codec.engines
ROOT = Path(codec.__file__).parent


def module(path):
    """A file's name inside the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module(p): p for p in ROOT.rglob("*.py") if p.stem != "_cffi" and p != ROOT / "__init__.py"}


def imports(path):
    """Modules of ours that a file imports, also where it does so inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "codec":
            inner = node.module.partition(".")[2]
            for a in node.names:
                name = f"{inner}.{a.name}".removeprefix(".")
                if inner or name in FILES:  # else a name that users have, too
                    yield name if name in FILES else inner
        elif isinstance(node, ast.Import):
            yield from (a.name.partition(".")[2] for a in node.names if a.name.startswith("codec."))


def check_layers(layers, files, part):
    """Check that all packages have a layer, and import only those of lower ones; `part` names a module's package."""
    layer = {name: i for i, names in enumerate(layers) for name in names}
    assert {part(name) for name in files} == set(layer)
    for name in files:
        for other in set(imports(FILES[name])) & set(files):
            here, there = part(name), part(other)
            assert here == there or layer[there] < layer[here], f"{name} imports {other}"


def test_packages_import_lower_layers_only():
    check_layers(LAYERS, [name for name in FILES if name != "_c"], lambda name: name.split(".")[0])


def test_engines_share_the_steps_and_the_native_engine_only():
    files = [name for name in FILES if name.startswith("engines.")]
    check_layers(ENGINES, files, lambda name: name.split(".")[1])


def check_no_circle(below):
    """Check that a graph, each node with those it points to, has no circle."""
    while below:
        free = {node for node, others in below.items() if not others & below.keys()}
        assert free, f"a circle among {sorted(below)}"
        below = {node: others for node, others in below.items() if node not in free}


def test_modules_import_each_other_in_no_circle():
    check_no_circle({name: set(imports(path)) - {name} for name, path in FILES.items()})


def test_only_engines_know_engines():
    """What users call makes requests and chooses; it does not know how an engine works."""
    for name in ("encoding", "decoding", "batch", "advisor.advise"):
        assert not any(other.startswith("engines.native") for other in imports(FILES[name])), name


def test_import_needs_numpy_and_cffi_alone():
    """Optional packages are imported where they are used."""
    allowed = {"numpy", "codec", "_cffi_backend", "cffi"}
    import subprocess
    import sys

    code = "import sys; old = set(sys.modules); import codec; print(*{m.split('.')[0] for m in set(sys.modules) - old})"
    out = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    foreign = {m for m in out.stdout.split() if m not in sys.stdlib_module_names and not m.startswith("_")}
    assert foreign <= allowed


# of native/src, from the bottom; families do not know each other
FLOORS = [{"exact"}, {"isa"}, {"frame"}, {"coder"}, {"lossless", "rows", "truncate"}, {"job"}]
SOURCES = Path(__file__).parents[1] / "native/src"
C_FILES = {str(p.relative_to(SOURCES)): p for p in SOURCES.rglob("*.[ch]")}


def includes(name):
    """Files of native/src that one of them includes."""
    for given in re.findall(r'^#include "([^"]+)"', C_FILES[name].read_text(), re.MULTILINE):
        beside = str(Path(name).parent / given)
        if beside in C_FILES or given in C_FILES:
            yield beside if beside in C_FILES else given


def test_floors_of_the_core():
    floor = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
    for name in C_FILES:
        here = name.split("/")[0]
        for other in includes(name):
            there = other.split("/")[0]
            assert here == there or floor[there] < floor[here], f"{name} includes {other}"


def test_no_circle_among_files():
    """A file and its header are one; what includes a header uses what stands in the file of that name."""
    unit = {name: name.rsplit(".", 1)[0] for name in C_FILES}
    below = {u: {unit[o] for n in C_FILES if unit[n] == u for o in includes(n)} - {u} for u in unit.values()}
    check_no_circle(below)
