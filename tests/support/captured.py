"""Recorded gradients, read from the files in bench/data."""

import ast
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np

import codec

DATA = Path(__file__).parents[2] / "bench/data"


def gradients(name):
    """Return the gradients in the file `name` of bench/data, each in the shape of its parameter."""
    with np.load(DATA / f"{name}.npz") as f:
        flat = f["grad_bits"].view(ml_dtypes.bfloat16) if "grad_bits" in f else f["grad"]
        pairs = codec.segments(ast.literal_eval(str(f["shapes"])))
    return [flat[at : at + prod(shape)].reshape(shape) for at, shape in pairs]


def bucket(tensors):
    return np.concatenate([x.reshape(-1) for x in tensors])
