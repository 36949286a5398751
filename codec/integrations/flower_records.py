# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# The framework is not installed where types are checked: its classes are unknown.
"""Convert Flower records to and from frames."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict

import codec
from codec.integrations.federated import FRAME, decode_array

Arrays = dict[tuple[str, str], Any]  # arrays by (name of the record, name of the array)


def pack(arrays: Mapping[str, Any]) -> ArrayRecord:
    """Encode arrays or tensors as a record. Also supports dtypes that Flower does not, such as bfloat16.

    Use it for the initial arrays of a strategy that is :class:`Compressed`, and for replies of clients with
    :class:`Compression`. Strategy and clients receive bfloat16 and float8 values as float32, which a model's
    ``load_state_dict`` accepts.
    """
    return ArrayRecord({name: frame_of(x) for name, x in arrays.items()})


def plain_array(x: Any) -> Array:
    """Return a Flower array of uncompressed values; of float32 if numpy does not support their dtype."""
    return Array(np.asarray(x, x.dtype if x.dtype.isbuiltin == 1 else np.float32))


def frame_of(x: Any) -> Array:
    """Encode an array or tensor losslessly, and return the frame as a Flower array."""
    return Array(str(x.dtype).removeprefix("torch."), tuple(x.shape), FRAME, codec.encode(x))


def values_of(array: Array) -> Any:
    """Return the values of a Flower array; decode it if it is a frame."""
    return decode_array(FRAME, array.data, None) if array.stype == FRAME else array.numpy()


def arrays_of(content: RecordDict) -> Arrays:
    """Return the arrays of all records in the content of a message."""
    return {(r, name): a for r, record in content.array_records.items() for name, a in record.items()}


def with_arrays(content: RecordDict, arrays: Arrays) -> RecordDict:
    """Return a copy of the content of a message in which `arrays` replace the arrays of the same names."""
    records = {
        r: ArrayRecord({name: arrays.get((r, name), a) for name, a in record.items()})
        for r, record in content.array_records.items()
    }
    return RecordDict({name: records.get(name, record) for name, record in content.items()})
