"""Replicas of torchft: processes that train, die at chosen phases of a step, and are started again."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import codec
import codec.torch
from codec.torch.transport.collective import CollectivePart
from support.faults import KILLED
from support.rank_loss import digest
from support.ranks import Rank

SECONDS = 240  # limit of a training; machines are busy
# Phases of a step in which a replica dies
QUORUM, REDUCE, COMMIT, HEALED, HEALS = "before the quorum", "in an all-reduce", "before the commit", "healed", "heals"
TWO_SHOT = codec.options(algorithm="two_shot")


def net():
    """Return the model, the same in all replicas."""
    torch.manual_seed(0)
    layers = (
        torch.nn.Linear(32, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 8),
    )
    return torch.nn.Sequential(*layers)


def in_fixed_point(model):
    """Round gradients to multiples of 2^-12, so that their sums are exact, in any order."""
    for p in model.parameters():
        p.register_hook(lambda g: (g * 4096).round() / 4096)


def batch(seed):
    """Return inputs and outputs."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 32, generator=g)
    return x, torch.tanh(x[:, :8] * 2) + x[:, 8:16]


def loss_of(model, seed):
    """Return the loss of a batch."""
    x, y = batch(seed)
    return (model(x) - y).square().mean()


def loss_at_end(model):
    """Return the loss of batches that no replica trains with."""
    with torch.no_grad():
        return sum(loss_of(model, 10**6 + i).item() for i in range(8)) / 8


def die():
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


class Training:
    """Training of one replica.

    Parameters
    ----------
    number, life : int
        Number of the replica, and the number of times that it has died before.
    folder : str
        Folder for messages between replicas.
    lighthouse : str
        Address of the lighthouse.
    how : dict
        Settings: `steps`; `group`, a function that returns the process group; `kind`, "ddp", "diloco" or "local_sgd";
        `fates`, by (number, life), the step and the phase in which the replica dies; `gates`, pairs of a step and of
        the number of processes that must have been started before this step; `healer_dies`, the step from which on the
        next replica dies that heals another one; `errors`, pairs of a replica and a step that fails on this replica
        alone; `same`, True: all replicas train with the same batches; `stock`, True: torchft's own Manager and modules.
    """

    def __init__(self, number, life, folder, lighthouse, how):
        import torchft

        from codec.integrations import torchft as ours

        self.number, self.folder, self.how, self.healings = number, Path(folder), how, 0
        self.fate = how.get("fates", {}).get((number, life), (-1, ""))
        self.net = net()
        in_fixed_point(self.net)
        group = how["group"]()
        compressed = isinstance(group, ours.ProcessGroupCodec) and not how.get("stock")
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.manager = (ours if compressed else torchft).Manager(
            pg=group,
            min_replica_size=2,
            init_sync=False,
            use_async_quorum=how["kind"] == "ddp",
            load_state_dict=self._load,
            state_dict=self._state,
            replica_id=f"replica_{number}",
            store_addr="localhost",
            store_port=self._store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=lighthouse,
            hostname="localhost",
            timeout=timedelta(seconds=30),
            quorum_timeout=timedelta(seconds=SECONDS),
            checkpoint_transport=self._transport(),
        )
        self.group, self.library = group, ours if compressed else torchft
        self.inner = torch.optim.SGD(self.net.parameters(), 0.05, momentum=0.9)
        time.sleep(0.3)  # the lighthouse now waits for this replica, since it has sent a heartbeat
        (self.folder / f"{number}.{life}.started").touch()

    def _transport(self):
        from torchft.checkpointing import HTTPTransport

        training = self

        class Transport(HTTPTransport):
            def recv_checkpoint(self, *args, **how):
                if training.fate[1] == HEALED:
                    die()
                return super().recv_checkpoint(*args, **how)

            def send_checkpoint(self, *args, **how):
                if training.manager.current_step() >= training.how.get("healer_dies", training.how["steps"]):
                    try:
                        (training.folder / "healer").touch(exist_ok=False)
                    except FileExistsError:
                        pass
                    else:
                        die()
                super().send_checkpoint(*args, **how)

        return Transport(timeout=timedelta(seconds=30), num_chunks=0)

    def _load(self, state):
        self.net.load_state_dict(state["net"])
        self.inner.load_state_dict(state["inner"])

    def _state(self):
        return {"net": self.net.state_dict(), "inner": self.inner.state_dict()}

    def at(self, phase):
        """Die if it is this replica's fate to die now."""
        if self.fate == (self.manager.current_step(), phase):
            die()

    def pass_gates(self):
        """Wait until all processes have been started that must take part in the next step."""
        wanted = max((n for step, n in self.how.get("gates", ()) if self.manager.current_step() >= step), default=0)
        while len(list(self.folder.glob("*.started"))) < wanted:
            time.sleep(0.02)

    def record(self):
        """Record the digest of the model after a committed step."""
        with (self.folder / f"{self.number}.digests").open("a") as file:
            file.write(f"{self.manager.current_step()} {digest(*self.net.parameters())}\n")

    def seed(self, i=0):
        """Return the seed of the next batch."""
        return 1000 * self.manager.current_step() + 100 * i + (0 if self.how.get("same") else self.number)

    def run(self):
        """Train; return the last loss, the counters of the group, and the number of steps in which it was healed."""
        {"ddp": self._ddp, "diloco": self._diloco, "local_sgd": self._local_sgd}[self.how["kind"]]()
        counters = self.group.stats() if hasattr(self.group, "stats") else None
        self.manager.shutdown(wait=False)
        self.group.shutdown()
        return loss_at_end(self.net), counters, self.healings

    def _ddp(self):
        import torchft

        model = self.library.DistributedDataParallel(self.manager, self.net, bucket_cap_mb=0.03)
        optimizer = torchft.Optimizer(self.manager, self.inner)
        send, sent = CollectivePart.send_frame, []

        def send_frame(part, *args):
            sent.append(1)
            if len(sent) > 1:
                self.at(REDUCE)
            return send(part, *args)

        CollectivePart.send_frame = send_frame
        while (step := self.manager.current_step()) < self.how["steps"]:
            self.pass_gates()
            self.at(QUORUM)
            sent.clear()
            optimizer.zero_grad()
            loss_of(model, self.seed()).backward()
            self.at(COMMIT)
            if (self.number, step) in self.how.get("errors", ()) and self.manager.num_participants() == 3:
                self.manager.report_error(RuntimeError("an error of this replica alone"))
            healed = not self.manager.is_participating()
            optimizer.step()
            if self.manager.current_step() > step:
                self.record()
                self.healings += healed
                assert not healed or self.largest_residual() == 0

    def _diloco(self):
        fragments = [self.net[:2], self.net[2:]]
        outer = [torch.optim.SGD(f.parameters(), 0.7, momentum=0.9, nesterov=True) for f in fragments]
        DiLoCo = getattr(self.library, "DiLoCo", None) or __import__("torchft").local_sgd.DiLoCo
        with DiLoCo(self.manager, fragments, self.inner, outer, sync_every=4, should_quantize=True):
            while (step := self.manager.current_step()) < self.how["steps"]:
                self.pass_gates()
                self.at(QUORUM)
                for i in range(2):  # sync_every divided by the number of fragments
                    self.inner.zero_grad()
                    loss_of(self.net, self.seed(i)).backward()
                    self.inner.step()
                if self.manager.current_step() > step:
                    self.record_fragments()

    def _local_sgd(self):
        from torchft.local_sgd import LocalSGD

        with LocalSGD(self.manager, self.net, self.inner, sync_every=2):
            while (step := self.manager.current_step()) < self.how["steps"]:
                self.pass_gates()
                for i in range(2):
                    self.inner.zero_grad()
                    loss_of(self.net, self.seed(i)).backward()
                    self.inner.step()
                if self.manager.current_step() > step:
                    self.record()

    def largest_residual(self):
        """Return the largest residual of this replica's own gradients."""
        states = [f.state_dict()["worker"] for f in getattr(self.group, "_residuals", {}).values()]
        return max((float(x.abs().max()) for state in states for x in state.values() if torch.is_tensor(x)), default=0)

    def record_fragments(self):
        """Record the digest of the fragment that was synchronized; the others differ between replicas."""
        step = self.manager.current_step()
        fragment = [self.net[:2], self.net[2:]][(step - 1) % 2]
        with (self.folder / f"{self.number}.digests").open("a") as file:
            file.write(f"{step} {digest(*fragment.parameters())}\n")


def _replica(number, life, folder, lighthouse, how):
    return Training(number, life, folder, lighthouse, how).run()


def train_replicas(folder, how, size=3):
    """Train with replicas, and start those again that die.

    Returns
    -------
    results, deaths, digests
        Result of :meth:`Training.run` by replica; number of deaths; and by step the digests of each replica.
    """
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=2, join_timeout_ms=1000 * SECONDS, quorum_tick_ms=20, heartbeat_timeout_ms=2000
    )
    ranks, lives, found = [Rank() for _ in range(size)], [0] * size, {}
    end = time.monotonic() + SECONDS
    try:
        for i, rank in enumerate(ranks):
            rank.start(_replica, i, 0, str(folder), lighthouse.address(), how)
        while len(found) < size:
            assert time.monotonic() < end, f"the training hangs: {found.keys()}, {lives}"
            for i in set(range(size)) - found.keys():
                if not ranks[i].poll(0.05):
                    continue
                succeeded, result = ranks[i].result(end)
                assert succeeded, result
                if result is not KILLED:
                    found[i] = result
                    continue
                ranks[i].close()
                ranks[i], lives[i] = Rank(), lives[i] + 1
                ranks[i].start(_replica, i, lives[i], str(folder), lighthouse.address(), how)
    finally:
        for rank in ranks:
            rank.close()
        lighthouse.shutdown()
    digests = {}
    for i in range(size):
        for line in (Path(folder) / f"{i}.digests").read_text().splitlines():
            step, each = line.split()
            digests.setdefault(int(step), {}).setdefault(i, each)
    return [found[i] for i in range(size)], sum(lives), digests


def trained_alone(steps):
    """Return the digest of the model after each step of one process that trains with the batches of replica 0."""
    model = net()
    in_fixed_point(model)
    optimizer, found = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), {}
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, 1000 * step).backward()
        optimizer.step()
        found[step + 1] = digest(*model.parameters())
    return found, loss_at_end(model)
