"""torch.ops.codec passes torch.library's checks, gives codec.encode's frames, and compiles without graph breaks."""

import pytest
import torch

import codec
import codec.torch

X = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
SPEC = codec.Quantize(4)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck of torch 2.15
@pytest.mark.parametrize("spec", ["small", "Quantize(4)"])
def test_operators_pass_the_checks_of_torch(spec):
    frame = codec.torch.ops.encode(X, SPEC)
    assert bytes(frame.numpy()) == codec.encode(X, SPEC) == bytes(torch.ops.codec.encode(X, spec).numpy())
    torch.library.opcheck(torch.ops.codec.encode, (X.clone().requires_grad_(), spec))
    torch.library.opcheck(torch.ops.codec.decode, (frame, [100, 64], torch.float32))


def test_compiled_function_is_one_graph():
    def both(x):
        frame = codec.torch.ops.encode(x * 2, SPEC)
        return codec.torch.ops.decode(frame, x.shape, x.dtype) + 1

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for x in (X, X[:50]):
        assert torch.equal(compiled(x), codec.decode(codec.encode(x * 2, SPEC), like=x) + 1)


def test_spec_made_inside_of_a_compiled_function_is_refused():
    compiled = torch.compile(lambda x: codec.torch.ops.encode(x, codec.Quantize(4)), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="cannot be created inside of a compiled function"):
        compiled(X)


def test_wrong_arguments_are_refused():
    frame = codec.torch.ops.encode(X)
    with pytest.raises(
        codec.ArgumentError, match=r"must hold torch.float32 of shape \(64,\), got float32 of shape \(100, 64\)"
    ):
        codec.torch.ops.decode(frame, (64,), torch.float32)
    with pytest.raises(codec.ArgumentError, match="must hold torch"):
        codec.torch.ops.decode(frame, (100, 64), torch.int32)
    with pytest.raises(codec.FrameError, match="truncated"):
        codec.torch.ops.decode(frame[:-1], (100, 64), torch.float32)
    for spec in ("Quantize(bit=4)", "Quantize(4", "3", "near", "Delta()", "smaller"):
        with pytest.raises(codec.SpecError):
            torch.ops.codec.encode(X, spec)
