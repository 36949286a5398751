"""JAX arrays on the CPU can be encoded, decoded to, and synchronized as weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import codec
from support.documentation import blocks

DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int8", "uint32", "bool")


def same(x, y):
    return isinstance(x, jax.Array) and x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_delta_round_trip_returns_an_array_of_jax(dtype):
    values = jax.random.normal(jax.random.key(0), (100, 30)) * 4
    old = values > 0 if dtype == "bool" else values.astype(dtype)
    new = old.at[3].set(old[4])
    frame = codec.encode(new, codec.Delta(), base=old)
    bits = np.uint8 if old.dtype.itemsize == 1 else f"u{old.dtype.itemsize}"
    host, base = (codec.view(np.asarray(x).view(bits), dtype) for x in (new, old))
    assert frame == codec.encode(host, codec.Delta(), base=base)
    decoded = codec.decode(frame, base=old, like=old)
    assert same(decoded, new)
    assert decoded.devices() == old.devices()
    assert not same(old, new)
    assert all(same(x, new) for x in codec.decode_many([codec.encode(new)] * 2, like=old))


def test_code_of_the_page():
    (code,) = blocks("JAX", "docs/guides/arrays.md")
    exec(code, {})


def test_callback_encodes_inside_of_a_compiled_function():
    def restored(x):
        return np.asarray(codec.decode(codec.encode(x, "balanced"), like=x))

    x = jax.random.normal(jax.random.key(0), (100, 30))
    inside = jax.jit(lambda x: jax.pure_callback(restored, jax.ShapeDtypeStruct(x.shape, x.dtype), 2 * x))
    assert same(inside(x), jnp.asarray(restored(2 * x)))


def test_sums_are_arrays_of_jax():
    x = jnp.arange(5000, dtype=jnp.float32)
    assert same(codec.reduce([codec.encode(x)] * 2, op="sum", like=x), 2 * x)


def test_transposed_and_computed_arrays_are_read_in_order():
    x = jnp.arange(12, dtype=jnp.bfloat16).reshape(3, 4)
    assert same(codec.decode(codec.encode(x.T), like=x), x.T)
    assert same(codec.decode(codec.encode(jnp.float32(3)), like=x), jnp.float32(3))


def test_values_of_64_bits_need_x64():
    frame = codec.encode(np.linspace(0, 1, 10))
    with pytest.raises(codec.ArgumentError, match="jax_enable_x64"):
        codec.decode(frame, like=jnp.zeros(1))
    with jax.enable_x64(True):
        decoded = codec.decode(frame, like=jnp.zeros(1))
    assert np.array_equal(decoded, np.linspace(0, 1, 10))


def test_weights_are_synchronized():
    """The receiver returns new JAX arrays; those of an earlier update do not change."""
    key = jax.random.key(0)
    old = {"embedding": jax.random.normal(key, (50, 24), jnp.bfloat16), "scale": jnp.ones(24)}
    sender, receiver, served = codec.WeightSender(old), codec.WeightReceiver(), {}
    receiver.apply(sender.snapshot(), served.update, like=jnp.zeros(0))
    first = dict(served)
    new = {"embedding": old["embedding"].at[7].mul(2), "scale": old["scale"]}
    update = sender.diff(new)
    assert list(update.tensors) == ["embedding"]
    receiver.apply(update, served.update, like=jnp.zeros(0))
    sender.commit()
    assert all(same(served[name], new[name]) for name in new)
    assert all(same(first[name], old[name]) for name in old)
    with pytest.raises(codec.ArgumentError, match="a writable array or tensor, got ArrayImpl"):
        receiver.apply(sender.diff(old), into=new)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "uint2", "float8_e4m3b11fnuz", "float8_e3m4", "complex64"])
def test_leaf_of_a_dtype_that_cannot_be_encoded_is_named(dtype):
    tree = {"layer/w": jnp.ones(4), "layer/scale": jnp.ones(4).astype(dtype)}
    with pytest.raises(codec.ArgumentError, match=f"'layer/scale': .*{dtype}"):
        codec.WeightSender(tree)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad])
def test_traced_arrays_are_rejected_with_the_way_out(transform):
    with pytest.raises(codec.ArgumentError, match=r"call codec outside, or by jax\.pure_callback"):
        transform(lambda x: (codec.encode(x), x.sum())[1])(jnp.ones(3))
