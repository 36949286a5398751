"""TensorFlow tensors on the CPU are encoded through DLPack; unsupported calls raise."""

import numpy as np
import pytest
import tensorflow as tf

import codec
from support.documentation import blocks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int64", "uint8", "bool"])
def test_tensor_round_trip(dtype):
    x = tf.cast(tf.random.normal((30, 40), seed=0) * 3, dtype)
    frame = codec.encode(x)
    assert frame == codec.encode(x.numpy())
    assert codec.inspect(frame).dtype == dtype
    back = tf.constant(codec.decode(frame))
    assert back.dtype == x.dtype
    assert np.array_equal(back.numpy(), x.numpy())


def test_code_of_the_page():
    (code,) = blocks("TensorFlow", "docs/guides/arrays.md")
    exec(code, {})


def test_variables_and_tensors_are_not_written_to():
    variable = tf.Variable(tf.zeros((3, 4)))
    frame = codec.encode(tf.ones((3, 4)))
    with pytest.raises(codec.ArgumentError, match="not a tensor: ResourceVariable"):
        codec.encode(variable)
    for out in (variable, variable.value()):
        with pytest.raises(codec.ArgumentError, match="out="):
            codec.decode(frame, out=out)
    variable.assign(codec.decode(frame))
    assert codec.encode(variable.value()) == frame


def test_function_calls_codec_by_numpy_function():
    @tf.function
    def restored(x):
        return tf.numpy_function(lambda a: codec.decode(codec.encode(a, "balanced")), [x], x.dtype)

    x = tf.random.normal((100, 100), seed=0)
    assert np.array_equal(restored(x).numpy(), codec.decode(codec.encode(x, "balanced")))
