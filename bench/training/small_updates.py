"""Measure updates of weights with many small tensors, of which one has changed.

    python bench/training/small_updates.py
    python bench/training/small_updates.py --tensors 1000 --values 4096

Columns: bytes of the update, and CPU seconds to encode it, to check it and to apply it.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import codec

sys.path.insert(0, str(Path(__file__).parent))
from summary import table


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a call, and its CPU seconds."""
    begin = time.process_time()
    found = call()
    return found, time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=10_000, help="number of float32 tensors (10000)")
    parser.add_argument("--values", type=int, default=100, help="values of a tensor (100)")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    names = [f"model.layers.{k // 100}.mlp.experts.{k % 100}.up_proj.weight" for k in range(args.tensors)]
    old = {name: rng.standard_normal(args.values).astype(np.float32) for name in names}
    new = old | {names[-1]: old[names[-1]] * np.float32(1.001)}
    sender, receiver = codec.WeightSender(old), codec.WeightReceiver(old)
    update, encode = timed(lambda: sender.diff({name: x.copy() for name, x in new.items()}))
    _, check = timed(lambda: receiver.stage(bytes(update.data)))
    _, apply = timed(receiver.commit)
    if dict(receiver.tensors())[names[-1]].tobytes() != new[names[-1]].tobytes():
        raise SystemExit("the receiver has other values")
    print(
        table(
            ["bytes", "encode", "check", "apply"],
            [[f"{update.nbytes:,}", *map("{:.3f}".format, (encode, check, apply))]],
        )
    )


if __name__ == "__main__":
    main()
