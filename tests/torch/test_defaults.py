"""torch's default device and dtype must not affect codec.torch, so its calls that create tensors pass both."""

import ast
from pathlib import Path

from torch.utils._device import _device_constructors

import codec.torch

ROOT = Path(codec.torch.__file__).parent
CONSTRUCTORS = {f.__name__ for f in _device_constructors()}
OF_VALUES = {"as_tensor", "asarray", "sparse_coo_tensor"}  # calls that derive the dtype from their arguments


def _missing(call):
    """Return which of device and dtype a tensor-creating call lacks; empty for other calls."""
    f = call.func
    made = isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name) and f.value.id == "torch"
    if not made or f.attr not in CONSTRUCTORS:
        return set()
    return ({"device"} if f.attr in OF_VALUES else {"device", "dtype"}) - {k.arg for k in call.keywords}


def test_constructors_of_tensors_name_device_and_dtype():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)} has no {' and no '.join(sorted(missing))}"
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and (missing := _missing(node))
    ]
    assert not found, "\n".join(found)
