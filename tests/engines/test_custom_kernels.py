"""Numba kernels accept users' quantizers and metrics, and can be compiled ahead of time."""

import ast
import re
import runpy
from pathlib import Path

import numba
import numpy as np
import pytest
import torch

import codec
from codec.__main__ import main
from codec.engines.numba import loops, rows
from codec.engines.numba.floats import to_floats
from codec.engines.numba.lanes import pairs_of
from codec.engines.numba.patching import trying

EXAMPLE = Path(__file__).parents[2] / "examples" / "new_kernel.py"


def statements_of(name, source):
    """Return the statements of a function as text, without docstring and comments."""
    [function] = [f for f in ast.parse(source).body if isinstance(f, ast.FunctionDef) and f.name == name]
    return [ast.unparse(s) for s in function.body[1 if ast.get_docstring(function) else 0 :]]


@pytest.mark.nightly
def test_example_of_a_custom_quantizer(capsys):
    """The quantizer of docs/tutorials/new-kernel.md has less noise and more bias, and restores the original kernels."""
    x = np.random.default_rng(1).standard_normal(5000).astype(np.float32)
    before = codec.encode(x, codec.Quantize(3), options=codec.options(engine="numba"))
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    (_, _, noise, bias), (_, _, less, more) = (line.split() for line in capsys.readouterr().out.splitlines()[1:])
    assert 0.7 * float(noise) < float(less) < 0.85 * float(noise)
    assert float(more) > 2 * float(bias)
    assert loops.rows is rows
    assert codec.encode(x, codec.Quantize(3), options=codec.options(engine="numba")) == before
    document = (EXAMPLE.parents[1] / "docs/tutorials/new-kernel.md").read_text()
    [block] = re.findall(r"```python\n([^`]*def narrow_codes[^`]*)```", document)
    assert statements_of("narrow_codes", block) == statements_of("narrow_codes", EXAMPLE.read_text())


def test_patching_rejects_wrong_functions():
    for module, function in ((rows, "_no_such"), (rows, "TIE"), (numba, "njit")):
        with pytest.raises(codec.EngineError), trying(module, **{function: print}):
            pass
    assert loops.rows is rows


def test_device_functions_cannot_be_called_from_python():
    """Calling a device function from Python is an error, not a crash."""
    with pytest.raises(TypeError, match="only kernels"):
        to_floats(1, np.zeros(8, np.uint8), 0, np.zeros(2, np.float32))
    pair = np.zeros(4096, np.uint32)
    pairs_of(np.zeros(256, np.uint8), np.full(256, 8, np.uint8), 255, pair)
    assert pair.any()


def test_metric_that_raises_keeps_all_bits():
    """If a metric raises for a value, every engine keeps all bits of that value and continues."""

    def of_most(theta):
        if -0.5 < theta < 0:
            raise ValueError("not of this one")
        return 100 / theta

    def by_nan(theta):
        return np.nan if -0.5 < theta < 0 else 100 / theta

    x = np.linspace(-1, 1, 5001, dtype=np.float32)
    metric = codec.optimizers.Custom(numba.njit(of_most))
    torch.set_flush_denormal(True)
    try:
        loops.fill_exponents(context_of(metric, x), len(x), 0, ea := np.empty(len(x), np.uint8))
        assert not ea[1251:2500].any()
        # The call did not change the thread's flush-to-zero mode
        assert (np.full(100, 1e-40, np.float32) * np.float32(1) == 0).all()
    finally:
        torch.set_flush_denormal(False)
    frames = [
        codec.encode(x, codec.Truncate().bind(m, theta=x), options=codec.options(engine=engine, threads=threads))
        for m in (metric, codec.optimizers.Custom(of_most), codec.optimizers.Custom(by_nan))
        for engine in ("native", "numba")
        for threads in (1, 3)
    ]
    assert len(set(frames)) == 1
    y = codec.decode(frames[0])
    assert (y[1251:2500] == x[1251:2500]).all()
    assert (y != x).any()


def test_compiled_metric_divides_by_zero_as_ieee():
    """A metric that the user compiled returns Inf or NaN for a division by 0, as IEEE 754 requires."""
    x = np.linspace(-1, 1, 5001, dtype=np.float32)
    frames = [
        codec.encode(
            x, codec.Truncate().bind(codec.optimizers.Custom(f), theta=x), options=codec.options(engine=engine)
        )
        for f in (
            lambda theta: 1 / theta,
            numba.njit(lambda theta: 1 / theta),
            numba.njit(lambda theta: 1 / theta, fastmath=False),
        )
        for engine in ("native", "numba")
    ]
    assert len(set(frames)) == 1


def test_metrics_that_numba_cannot_compile_are_rejected():
    for f in (lambda theta: theta.foo, lambda theta: {1: theta}, lambda theta: "a", lambda theta: None,
              lambda theta: 1j * theta, lambda theta: input(theta)):  # fmt: skip
        with pytest.raises(codec.ArgumentError, match="cannot compile the function, which must return one number"):
            codec.optimizers.Custom(f)
    for f in (5, None, "theta", print):
        with pytest.raises(
            codec.ArgumentError, match="Custom takes a Python function with parameters from theta, m and v"
        ):
            codec.optimizers.Custom(f)


def context_of(optimizer, theta):
    """Return the context of a call with an optimizer."""
    from codec import _call
    from codec.optimizers.arguments import level_source, set_levels

    call = _call.take()
    set_levels(call, level_source(codec.Truncate().bind(optimizer, theta=theta), theta.size))
    context_of.keep = call
    return call.context


def test_warmup_compiles_every_kernel_of_a_spec():
    codec.warmup([codec.Sign(), codec.Float8()], ("float32", np.float16, "int8"), progress=False)
    custom = codec.optimizers.Custom(lambda m, v: m * v)
    codec.warmup(codec.Truncate().bind(custom, m=np.ones(1), v=np.ones(1)), torch.bfloat16)
    codec.warmup(codec.Lossless(), options=codec.options(engine="native"))
    codec.warmup({codec.Sign()}, (name for name in ("float32", torch.bfloat16)), options=codec.options(engine="native"))
    for bad in (
        lambda: codec.warmup(codec.Sign(), "int8"),
        lambda: codec.warmup(codec.Sign(), "complex64"),
        lambda: codec.warmup(codec.Sign(), None),
    ):
        with pytest.raises(codec.ArgumentError):
            bad()
    for bad in ([codec.Sign(), "sign"], codec.Sign, 5):
        with pytest.raises(codec.SpecError, match="not a spec"):
            codec.warmup(bad)
    with pytest.raises(codec.EngineError):
        codec.warmup(options=codec.options(engine="abacus"))


def test_warmup_reports_progress_on_stderr(capsys):
    """warmup() prints its progress to stderr, and only with progress=True."""
    for asked in (True, False):
        codec.warmup(codec.Sign(), ["float32", "bfloat16"], progress=asked)
        out, said = capsys.readouterr()
        assert ("compiled" in said) == asked
        assert out == ""


def test_warmup_command_compiles_all_specs_and_rejects_unknown_dtypes(capsys):
    assert main(["warmup", "--dtypes", "float32"]) == 0
    assert capsys.readouterr() == ("", "")  # progress is shown on terminals only
    assert main(["warmup", "--dtypes", "float3"]) == 1
    assert "float3 cannot be encoded" in capsys.readouterr().err
