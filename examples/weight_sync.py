"""Update the weights of an inference process over a link of 20 Mbit/s.

    python examples/weight_sync.py

The trainer encodes the difference from the rollout process's version, and sends it over a TCP connection. The rollout
process validates the update, loads the changed tensors, and replies with its version. The trainer rounds float32
weights, which move by small steps as under AdamW with a learning rate of 1e-6, to bfloat16.
"""

import argparse
import multiprocessing
import socket
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

import torch

import codec

RATE = 20e6  # bits per second


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).to(torch.bfloat16)


def send(link: socket.socket, data: memoryview) -> None:
    """Send the size of `data`, then `data`, throttled to RATE."""
    link.sendall(len(data).to_bytes(8, "little"))
    for at in range(0, len(data), 1 << 14):
        part = data[at : at + (1 << 14)]
        link.sendall(part)
        time.sleep(8 * len(part) / RATE)


def roll_out(address: tuple[str, int]) -> None:
    """Apply updates until the connection ends."""
    torch.set_num_threads(1)
    model, receiver = new_model(), codec.WeightReceiver()

    def load(tensors: Iterator[tuple[str, Any]]) -> None:
        model.load_state_dict(dict(tensors), strict=False)

    with socket.create_connection(address) as link, link.makefile("rb") as file:
        while update := read_update(file):
            receiver.apply(update, load, like=torch.empty(0))
            assert codec.WeightReceiver(model).digest == receiver.digest  # the model's weights are bit-identical
            link.sendall(receiver.version.to_bytes(8, "little"))


def read_update(file: BinaryIO) -> bytes:
    return file.read(int.from_bytes(file.read(8), "little"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    model = new_model()
    masters = {name: p.detach().float() for name, p in model.named_parameters()}
    weights = sum(p.nbytes for p in model.parameters())
    sender = codec.WeightSender(model)
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = multiprocessing.get_context("spawn").Process(target=roll_out, args=(server.getsockname(),))
        child.start()
        link, _ = server.accept()
        with link, link.makefile("rb") as file:
            for step in range(args.steps + 1):
                begin = time.perf_counter()
                update = sender.diff(model) if step else sender.snapshot()
                send(link, update.data)
                assert int.from_bytes(file.read(8), "little") == update.version
                if step:
                    sender.commit(update.version)
                seconds, part = time.perf_counter() - begin, update.nbytes / weights
                kind = "update  " if step else "snapshot"
                print(f"{kind} {update.version}: {update.nbytes:8,} bytes, {part:6.2%} of the weights, {seconds:.2f} s")
                for name, p in model.named_parameters():
                    masters[name] += 1e-6 * torch.randn_like(masters[name]).sign()
                    p.data.copy_(masters[name])
    child.join()
    raise SystemExit(child.exitcode)


if __name__ == "__main__":
    main()
