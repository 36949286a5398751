# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# The framework is not installed where types are checked: its classes are unknown.
"""Records of Flower whose arrays are frames."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict

import codec
from codec.integrations.federated import FRAME, decode_array

Arrays = dict[tuple[str, str], Any]  # by the names of record and array


def pack(arrays: Mapping[str, Any]) -> ArrayRecord:
    """Return arrays or tensors as a record, also of dtypes that Flower cannot hold: ``model.state_dict()`` in bfloat16.

    Use it for the initial arrays of a strategy that is :class:`Compressed`, and for replies of clients with
    :class:`Compression`. They get bfloat16 and float8 values as float32, which a model's ``load_state_dict`` takes.
    """
    return ArrayRecord({name: frame_of(x) for name, x in arrays.items()})


def plain_array(x: Any) -> Array:
    """Return values as Flower's array, in float32 if numpy lacks their dtype."""
    return Array(np.asarray(x, x.dtype if x.dtype.isbuiltin == 1 else np.float32))


def frame_of(x: Any) -> Array:
    """Return an array or tensor as a frame."""
    return Array(str(x.dtype).removeprefix("torch."), tuple(x.shape), FRAME, codec.encode(x))


def values_of(array: Array) -> Any:
    """Return the values of Flower's array, which may be a frame."""
    return decode_array(FRAME, array.data, None) if array.stype == FRAME else array.numpy()


def arrays_of(content: RecordDict) -> Arrays:
    """Return the arrays of all records of a content."""
    return {(r, name): a for r, record in content.array_records.items() for name, a in record.items()}


def with_arrays(content: RecordDict, arrays: Arrays) -> RecordDict:
    """Return a copy of a content with other arrays in place of some."""
    records = {
        r: ArrayRecord({name: arrays.get((r, name), a) for name, a in record.items()})
        for r, record in content.array_records.items()
    }
    return RecordDict({name: records.get(name, record) for name, record in content.items()})
