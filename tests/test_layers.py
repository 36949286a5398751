"""Arrows point down only: no module imports one that stands above it."""

import ast
import re
from pathlib import Path

import codec

# from the bottom; modules of one line do not know each other
LAYERS = [
    {"errors", "ownership"},
    {"specs", "core", "dlpack"},
    {"spec_structs", "segmenting", "pool", "view", "predicting"},
    {"metrics.formulas", "metrics.custom"},
    {"metrics.asked", "metrics.optimizers"},
    {"metrics"},
    {"structs"},
    {"codebook", "frame"},
    {"engines.request"},
    {"engines.steps", "engines.native.memory"},
    {"engines.native.encoding"},
    {"engines.native.decoding"},
    {"engines.native.reducing", "engines.native.many"},
    {"engines.native"},
    {"engines.numba.jit"},
    {"engines.numba.words", "engines.numba.seal", "engines.numba.lanes", "engines.numba.memory"},
    {"engines.numba.floats", "engines.numba.draws", "engines.numba.packing", "engines.numba.region"},
    {"engines.numba.view", "engines.numba.model", "engines.numba.metric"},
    {"engines.numba.parts"},
    {"engines.numba.scales"},
    {"engines.numba.codes"},
    {"engines.numba.lossless", "engines.numba.rows", "engines.numba.truncate"},
    {"engines.numba.loops"},
    {"engines.numba.calls", "engines.numba.trying"},
    {"engines.numba"},
    {"engines.cuda.image", "engines.cuda.cache"},
    {"engines.cuda.kernels"},
    {"engines.cuda.gpu"},
    {"engines.cuda.devices"},
    {"engines.cuda.work"},
    {"engines.cuda.before"},
    {"engines.cuda.job"},
    {"engines.cuda.encoding"},
    {"engines.cuda.decoding", "engines.cuda.pending"},
    {"engines.cuda.reading"},
    {"engines.cuda.calls"},
    {"engines.cuda"},
    {"engines"},
    {"encoding", "decoding"},
    {"many", "sampling", "stateful.ranges"},
    {"stateful.saved"},
    {"stateful.resharding", "stateful.refresher"},
    {"stateful.feedback"},
    {"stateful", "advising", "warming", "files"},
    {"__main__"},
    {"torch.slices", "torch.worker", "torch.choosing", "torch.counters", "torch.hook_state", "torch.lifetime"},
    {"torch.channel", "torch.handle", "torch.stats"},
    {"torch.reduction", "torch.lines"},
    {"torch.phases", "torch.raw", "torch.arguments"},
    {"torch.algorithms", "torch.buckets", "torch.exchanging", "torch.residuals"},
    {"torch.ternary", "torch.hook_residuals", "torch.optimizer_state", "torch.policy"},
    {"torch.collectives", "torch.passes"},
    {"torch.refreshing", "torch.other_dtypes", "torch.coalesced"},
    {"torch.hook", "torch.fsdp", "torch.backend"},
    {"torch.ddp"},
    {"torch"},
]
ROOT = Path(codec.__file__).parent


def module(path):
    """A file's name inside the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {*ROOT.rglob("*.py"), *(ROOT / "torch").glob("*.py")}  # which may be a link
FILES = {module(p): p for p in PATHS if p.stem != "_cffi" and p != ROOT / "__init__.py"}


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


def test_arrows():
    place = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    assert set(FILES) == set(place)
    for name, path in FILES.items():
        for other in set(imports(path)) - {"_cffi"}:
            assert place[other] < place[name], f"{name} imports {other}"


def test_only_engines_know_engines():
    """What users call makes requests and chooses; it does not know how an engine works."""
    for name in ("encoding", "decoding", "many", "advising"):
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
    while below:
        free = {u for u, others in below.items() if not others & below.keys()}
        assert free, f"a circle among {sorted(below)}"
        below = {u: others for u, others in below.items() if u not in free}
