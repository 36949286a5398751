"""Layers of the package, of native/src and of tests: no module imports a module of a higher layer, or is too long."""

import ast
import re
from pathlib import Path

import codec

# Packages and modules of `codec`, lowest layer first. Modules of one line do not import each other. `_c`, which only
# locates the compiled package, is below all layers.
LAYERS = [
    {"errors", "readable", "_ownership"},
    {"arguments", "_secret"},
    {"_tls", "stores"},
    {"_security"},
    {"specs"},
    {"_c"},
    {"tensors", "presets"},
    {"spec_text", "spec_config", "_call", "_options"},
    {"optimizers", "inspection"},
    {"engines"},
    {"codebook", "explain", "packs"},
    {"encoding", "decoding"},
    {"reducing", "batch", "delta", "_warmup", "files"},
    {"code_sums", "advisor", "kv", "stateful", "weight_sync"},
    {"checkpoints"},
    {"torch"},
    {"cli"},
    {"integrations", "run", "__main__"},
]
TORCH = [  # layers within codec.torch; `__init__`, which exports the public names, is above all layers
    {"_compat"},
    {"network"},
    {"transport"},
    {"group"},
    {"point_to_point", "reduction"},
    {"auto", "feedback", "parameter_server", "saving", "autograd", "ops"},
    {"collectives", "fsdp"},
    {"backend", "ddp", "replicas", "pipelining"},
    {"local_steps", "one_bit_adam"},
    {"rounds"},
]
WEIGHT_SYNC = [{"closing"}, {"updates"}, {"http"}, {"store", "bases"}]  # below the other modules of codec.weight_sync
ENGINES = [{"request"}, {"blockwise", "small"}, {"native"}, {"numba", "cuda"}]  # layers within codec.engines
ROOT = Path(codec.__file__).parent
REPOSITORY = Path(__file__).parents[2]


def module(path):
    """Return the module name of a file, relative to the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module(p): p for p in ROOT.rglob("*.py") if p.stem != "_cffi" and p != ROOT / "__init__.py"}


def imports(path):
    """Yield the modules of this package that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "codec":
            inner = node.module.partition(".")[2]
            for a in node.names:
                name = f"{inner}.{a.name}".removeprefix(".")
                if inner or name in FILES:  # skips public names, as in `from codec import encode`
                    yield name if name in FILES else inner
        elif isinstance(node, ast.Import):
            yield from (a.name.partition(".")[2] for a in node.names if a.name.startswith("codec."))


def check_layers(layers, files, part):
    """Check that each package has a layer, and imports lower layers only. `part` maps a module to its package."""
    layer = {name: i for i, names in enumerate(layers) for name in names}
    assert {part(name) for name in files} == set(layer)
    for name in files:
        for other in set(imports(FILES[name])) & set(files):
            here, there = part(name), part(other)
            assert here == there or layer[there] < layer[here], f"{name} imports {other}"


def test_packages_import_lower_layers_only():
    check_layers(LAYERS, [name for name in FILES if name != "_c"], lambda name: name.split(".")[0])


def test_engines_import_only_the_native_engine_and_shared_modules():
    files = [name for name in FILES if name.startswith("engines.")]
    check_layers(ENGINES, files, lambda name: name.split(".")[1])


def test_torch_packages_import_lower_floors_only():
    files = [name for name in FILES if name.startswith("torch.")]
    check_layers(TORCH, files, lambda name: name.split(".")[1])


def test_packages_of_weight_sync_import_lower_layers_only():
    files = [name for name in FILES if name.startswith("weight_sync.")]
    packages = set().union(*WEIGHT_SYNC)

    def part(name):
        return name.split(".")[1] if name.split(".")[1] in packages else "above"

    check_layers([*WEIGHT_SYNC, {"above"}], files, part)


def test_torch_packages_stay_small_and_say_what_they_are_for():
    """A package has at most 12 modules of at most 400 lines, and a docstring."""
    for package in sorted(
        {name.split(".")[1] for name in FILES if name.startswith("torch.")} - {"_compat", "backend", "ops"}
    ):
        rooms = [p for name, p in FILES.items() if name.startswith(f"torch.{package}.")]
        assert len(rooms) <= 12, f"{package} has {len(rooms)} modules"
        assert [p.name for p in rooms if len(p.read_text().splitlines()) > 400] == [], package
        assert ast.get_docstring(ast.parse(FILES[f"torch.{package}"].read_text())), package


def test_files_of_more_than_400_lines_say_why_they_are_one_file():
    """In a file of more than 400 lines, the first comment has a sentence that begins with "One file:"."""
    silent = []
    for folder in ("bindings", "codec", "fuzz", "native/include", "native/src", "native/tests", "tests"):
        for path in (REPOSITORY / folder).rglob("*.[pch]*"):
            if path.suffix in (".py", ".c", ".h") and "__pycache__" not in path.parts:
                text = path.read_text()
                first = text.split('"""' if path.suffix == ".py" else "*/")[path.suffix == ".py"]
                if text.count("\n") > 400 and "One file: " not in first:
                    silent.append(str(path.relative_to(REPOSITORY)))
    assert not silent, "split these files, or begin a sentence of their first comment with 'One file:'"


def check_no_cycle(below):
    """Check that a graph, given as a dict of successors, has no cycle."""
    while below:
        free = {node for node, others in below.items() if not others & below.keys()}
        assert free, f"a cycle among {sorted(below)}"
        below = {node: others for node, others in below.items() if node not in free}


def test_modules_import_each_other_without_a_cycle():
    check_no_cycle({name: set(imports(path)) - {name} for name, path in FILES.items()})


def test_public_functions_do_not_import_the_native_engine():
    """Public functions create requests, whose engine codec.engines chooses, or call codec.engines.small."""
    for name in ("encoding", "decoding", "reducing", "batch", "advisor.advise"):
        assert not any(other.startswith("engines.native") for other in imports(FILES[name])), name


def test_import_loads_no_optional_package():
    """`import codec` needs numpy and cffi only."""
    allowed = {"numpy", "cython_runtime", "codec", "_cffi_backend", "cffi"}  # numpy 1 imports cython_runtime
    import subprocess
    import sys

    code = "import sys; old = set(sys.modules); import codec; print(*{m.split('.')[0] for m in set(sys.modules) - old})"
    out = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    foreign = {m for m in out.stdout.split() if m not in sys.stdlib_module_names and not m.startswith("_")}
    assert foreign <= allowed


# folders of native/src, lowest layer first; folders of one layer do not include each other's files
FLOORS = [{"exact"}, {"isa"}, {"frame"}, {"coder"}, {"delta", "lossless", "rows", "topk", "truncate"}, {"job"}]
SOURCES = REPOSITORY / "native/src"
C_FILES = {str(p.relative_to(SOURCES)): p for p in SOURCES.rglob("*.[ch]")}


def includes(name):
    """Yield the files of native/src that a file includes."""
    for given in re.findall(r'^#include "([^"]+)"', C_FILES[name].read_text(), re.MULTILINE):
        beside = str(Path(name).parent / given)
        if beside in C_FILES or given in C_FILES:
            yield beside if beside in C_FILES else given


def test_c_files_include_lower_folders_only():
    floor = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
    for name in C_FILES:
        here = name.split("/")[0]
        for other in includes(name):
            there = other.split("/")[0]
            assert here == there or floor[there] < floor[here], f"{name} includes {other}"


def test_c_files_include_each_other_without_a_cycle():
    """The include graph has no cycle, where a header and the source of the same name are one node."""
    unit = {name: name.rsplit(".", 1)[0] for name in C_FILES}
    below = {u: {unit[o] for n in C_FILES if unit[n] == u for o in includes(n)} - {u} for u in unit.values()}
    check_no_cycle(below)


# Files that make buffers over C memory: the first makes arrays that keep their memory alive; the others read structs,
# jobs and messages whose memory the same file holds
OVER_ADDRESSES = {
    "tensors/view.py": {"array_at"},
    "tensors/dlpack.py": {"from_address"},  # fields of a capsule's struct, read at once
    "engines/cuda/cupy_backend.py": {"from_address"},  # the buffer keeps CuPy's memory as its attribute
    "engines/cuda/decoding.py": {"buffer"},
    "engines/cuda/plan.py": {"buffer"},
    "engines/cuda/upload.py": {"buffer"},
    "engines/numba/memory.py": {"buffer"},  # arrays of one call, which keeps its tensors
    "engines/numba/view.py": {"buffer"},
    "_call.py": {"buffer"},
    "codebook.py": {"buffer"},
}


def test_arrays_over_addresses_are_made_in_one_place():
    """An array over an address without an owner shows freed memory sooner or later; `TensorView.array` has an owner."""
    found = {}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            of_ffi = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "ffi"
            if name in ("from_address", "array_at", "as_strided") or (name == "buffer" and of_ffi):
                found.setdefault(path.relative_to(ROOT).as_posix(), set()).add(name)
    assert found == OVER_ADDRESSES


TESTS = Path(__file__).parents[1]
TEST_MODULES = {p.stem for p in TESTS.rglob("*.py") if p.parent.name not in ("support", "reference")}


def imported_names(path):
    """Yield the first component of each module that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)


def test_tests_import_helpers_only_from_support_and_reference():
    """Tests import no test module, and reference implementations import no module of tests but each other."""
    for path in TESTS.rglob("*.py"):
        below = {"reference"} if path.parent.name == "reference" else {"reference", "support"}
        others = set(imported_names(path)) & {*TEST_MODULES, "reference", "support"}
        assert others <= below, f"{path} imports {sorted(others - below)}"
