"""CPU time of encoding and decoding the messages of a pipeline edge, and bytes of m that each side reads and writes."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from systems import FP32, FP32_TCP, Setting, side_of, uses_samples
from tasks import Sizes

REPEAT = 15
PAPER = (1, 1024, 1600)  # shape of a micro-batch in the paper's experiments
CHANGE = 0.05  # relative change |a - m| / |a| of the generated activations


def seconds_of(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU time of a call in this thread, and its result."""
    begin = time.thread_time()
    result = call()
    return time.thread_time() - begin, result


def shapes_of(sizes: Sizes) -> list[tuple[int, int, int]]:
    """Return two shapes of a micro-batch: the shape in this benchmark's training, and the shape in the paper."""
    return [(sizes.batch // sizes.micro_batches, sizes.context, sizes.width), PAPER]


def measure(setting: Setting, shape: tuple[int, int, int], rate: float) -> dict[str, Any]:
    """Return the median CPU time of each call for a message after the first epoch.

    `share` is the CPU time for activations of the busier stage, divided by the time that the message takes at `rate`
    bits per second. Encoding and decoding include the commit of m.
    """
    rows = shape[0]
    random = np.random.default_rng(0)
    x, change = (random.standard_normal(shape, np.float32) for _ in range(2))
    out, ids = np.empty_like(x), list(range(rows)) if uses_samples(setting) else None
    sender, receiver = (side_of(setting, 0, role) for role in (0, 1))
    times: dict[str, list[float]] = {"encode": [], "decode": [], "gradient": []}
    message = gradient = b""
    for i in range(REPEAT + 1):
        x += np.float32(CHANGE if i % 2 else -CHANGE) * change
        spent, message = seconds_of(lambda: sender.encode(x, ids))
        commit, _ = seconds_of(sender.commit)
        decode, _ = seconds_of(lambda: receiver.decode(message, ids, out=out))
        theirs, _ = seconds_of(receiver.commit)
        backward, gradient = seconds_of(lambda: receiver.encode_gradient(change))
        back, _ = seconds_of(lambda: sender.decode_gradient(gradient, out=out))
        if i:  # skip the first message, in which samples are sent raw as in the first epoch
            for name, value in (
                ("encode", spent + commit),
                ("decode", decode + theirs),
                ("gradient", max(backward, back)),
            ):
                times[name].append(value)
    found = {name: statistics.median(values) for name, values in times.items()}
    wire, wire_back = 8 * len(message) / rate, 8 * len(gradient) / rate
    return found | {
        "label": setting.label,
        "shape": shape,
        "nbytes": len(message),
        "gradient_nbytes": len(gradient),
        "share": max(found["encode"], found["decode"]) / wire,
        "gradient_share": found["gradient"] / wire_back,
    }


def store_row(setting: Setting, sizes: Sizes) -> dict[str, Any]:
    """Return the bytes of m that one side of an edge stores, and the bytes that it reads and writes per step."""
    import codec

    sample = sizes.context * sizes.width
    edge = codec.ActivationDelta(setting.forward, dtype=setting.dtype)
    edge.encode(np.ones((1, sizes.context, sizes.width), np.float32), [0])
    edge.commit()
    entry = edge.stats().entries_nbytes
    return {
        "label": str(setting.dtype),
        "entry_nbytes": entry,
        "values": sample,
        "kept_nbytes": entry * sizes.samples,
        "step_nbytes": 2 * entry * sizes.batch,
    }


def is_coded(setting: Setting) -> bool:
    """Return True if a setting compresses messages."""
    return setting.system not in (FP32, FP32_TCP)
