"""Train a language model by reinforcement learning in two processes that send weights over a slow link.

    python bench/training/weight_sync.py               # a minute and a half on two cores
    python bench/training/weight_sync.py --rate 100e6 --steps 50 --json FILE

A trainer has float32 weights and AdamW; a rollout process generates with their bfloat16 values. In each step the
trainer sends the new weights, the rollout generates bytes after random prompts, and the trainer takes a step of
REINFORCE [1]_ with the mean reward as its baseline. The reward is the fraction of bytes that are lowercase letters. The
link is a TCP connection, which the sender throttles to --rate bits per second.

    full       all bfloat16 values in each step
    updates    codec.WeightSender and codec.WeightReceiver

Columns:

sent         bytes of weights sent per step, the first step excluded
of full      `sent` relative to the size of all bfloat16 values
pause        seconds from the first byte of new weights until the rollout has loaded them: mean and largest
step         seconds of a step, in which trainer and rollout take turns
reward       mean reward of the last step

The last line says whether all losses and rewards of both methods are bit-identical.

.. [1] R. Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning", 1992.
"""

import argparse
import json
import multiprocessing
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import codec

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from models import Language

METHODS = ("full", "updates")
PROMPT, ANSWER = 8, 24  # bytes of a prompt, and of the answer to it
LR = 1e-5
CHUNK = 16 << 10  # bytes that the throttled sender sends between two waits


def new_model(width: int, layers: int) -> Language:
    torch.manual_seed(0)
    return Language(width, layers, PROMPT + ANSWER)


def rounded(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's weights, rounded to bfloat16, by name."""
    return {name: x.detach().to(torch.bfloat16) for name, x in model.named_parameters()}


def load(model: torch.nn.Module, tensors: Any) -> None:
    """Copy weights into a model."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, x in tensors:
            parameters[name].copy_(x)


def send(link: socket.socket, data: Any, rate: float) -> None:
    """Send the size of `data`, then `data`, at no more than `rate` bits per second."""
    link.sendall(len(data).to_bytes(8, "little"))
    begin = time.perf_counter()
    for at in range(0, len(data), CHUNK):
        link.sendall(data[at : at + CHUNK])
        time.sleep(max(0.0, begin + 8 * (at + CHUNK) / rate - time.perf_counter()))


def receive(file: Any) -> tuple[bytes, float]:
    """Receive data that :func:`send` sent; return the data, and the arrival time of the first byte."""
    n = int.from_bytes(file.read(8), "little")
    begin = time.perf_counter()
    return file.read(n), begin


def full_bytes(weights: dict[str, torch.Tensor]) -> bytes:
    return b"".join(x.view(torch.int16).numpy().tobytes() for x in weights.values())


def full_tensors(data: bytes, model: torch.nn.Module) -> Any:
    values, at = torch.frombuffer(bytearray(data), dtype=torch.bfloat16), 0
    for name, x in model.named_parameters():
        yield name, values[at : at + x.numel()].view(x.shape)
        at += x.numel()


@torch.no_grad()
def generate(model: torch.nn.Module, batch: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Generate answers to random prompts; return prompts with answers, and the reward of each."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(256, (batch, PROMPT), generator=g)
    for _ in range(ANSWER):
        p = model(x)[:, -1].softmax(-1)
        x = torch.cat((x, torch.multinomial(p, 1, generator=g)), 1)
    answer = x[:, PROMPT:]
    return x, ((answer >= ord("a")) & (answer <= ord("z"))).float().mean(1)


def roll_out(address: Any, method: str, width: int, layers: int, steps: int, batch: int) -> None:
    """Receive weights, generate with them, and send answers, rewards and pauses to the trainer."""
    torch.set_num_threads(1)
    model = new_model(width, layers)
    receiver = codec.WeightReceiver(rounded(model))
    load(model, receiver.tensors(like=torch.empty(0)))  # the first update contains no changes
    with socket.create_connection(address, timeout=300) as link, link.makefile("rb") as file:
        for step in range(steps):
            data, begin = receive(file)
            if method == "full":
                load(model, full_tensors(data, model))
            else:
                receiver.apply(data, load=lambda tensors: load(model, tensors), like=torch.empty(0))
            pause = time.perf_counter() - begin
            x, reward = generate(model, batch, step)
            send(link, x.to(torch.uint8).numpy().tobytes() + reward.numpy().tobytes(), 1e12)
            send(link, json.dumps(pause).encode(), 1e12)


def train(method: str, rate: float, width: int, layers: int, steps: int, batch: int) -> dict[str, Any]:
    """Run the trainer with one method of sending weights; return losses, rewards, bytes and times."""
    masters, model = new_model(width, layers), new_model(width, layers)
    sender = codec.WeightSender(rounded(model))
    optimizer = torch.optim.AdamW(masters.parameters(), lr=LR, weight_decay=0)
    run: dict[str, Any] = {"method": method, "losses": [], "rewards": [], "sent": [], "pauses": [], "seconds": []}
    with socket.create_server(("127.0.0.1", 0)) as server:
        arguments = (server.getsockname(), method, width, layers, steps, batch)
        child = multiprocessing.get_context("spawn").Process(target=roll_out, args=arguments)
        child.start()
        server.settimeout(300)
        link, _ = server.accept()
        with link, link.makefile("rb") as file:
            for _ in range(steps):
                begin = time.perf_counter()
                weights = rounded(masters)
                data = full_bytes(weights) if method == "full" else sender.diff(weights).data
                send(link, data, rate)
                answers, _ = receive(file)
                if method == "updates":
                    sender.commit()  # the rollout has answered with these weights
                n = batch * (PROMPT + ANSWER)
                x = torch.frombuffer(bytearray(answers[:n]), dtype=torch.uint8).view(batch, -1).long()
                reward = torch.frombuffer(bytearray(answers[n:]), dtype=torch.float32)
                load(model, weights.items())
                logp = model(x[:, :-1]).log_softmax(-1).gather(2, x[:, 1:, None])[:, PROMPT - 1 :, 0].sum(1)
                loss = -((reward - reward.mean()) / (reward.std() + 1e-6) * logp).mean()
                model.zero_grad()
                loss.backward()
                for master, p in zip(masters.parameters(), model.parameters(), strict=True):
                    master.grad = p.grad
                optimizer.step()
                run["losses"].append(loss.item())
                run["rewards"].append(reward.mean().item())
                run["sent"].append(len(data))
                run["pauses"].append(json.loads(receive(file)[0]))
                run["seconds"].append(time.perf_counter() - begin)
        child.join(60)
    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=20e6, help="bits per second; default: 20e6")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32, help="answers in a step")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", help="write all figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    runs = [train(method, args.rate, args.width, args.layers, args.steps, args.batch) for method in METHODS]
    full = statistics.mean(runs[0]["sent"])
    print(f"{full / 2e6:.2f} million weights, {args.rate / 1e6:g} Mbit/s, {args.steps} steps, learning rate {LR:g}")
    print(f"{'':8} {'sent':>10} {'of full':>8} {'pause':>14} {'step':>6} {'reward':>8}")
    for run in runs:
        sent = statistics.mean(run["sent"][1:])
        pause = f"{statistics.mean(run['pauses'][1:]):.3f}, {max(run['pauses'][1:]):.3f} s"
        step = statistics.mean(run["seconds"][1:])
        sizes = f"{sent / 1e3:7.1f} kB {sent / full:8.2%}"
        print(f"{run['method']:8} {sizes} {pause:>14} {step:4.1f} s {run['rewards'][-1]:8.4f}")
    equal = all(runs[0][name] == runs[1][name] for name in ("losses", "rewards"))
    print(f"losses and rewards equal to the bit: {'yes' if equal else 'NO'}")
    if args.json:
        Path(args.json).write_text(json.dumps({"arguments": vars(args), "equal": equal, "runs": runs}, indent=1))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
