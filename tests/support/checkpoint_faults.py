"""Checkpoints of changes whose storage fails at a system call; support/storage_faults.py runs the operations."""

import logging
import shutil
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import codec
import codec.torch
from codec.checkpoints.chain import verify_checkpoint

warnings.simplefilter("ignore")
logging.getLogger("codec.torch").setLevel(logging.ERROR)


def state_of(step):
    """Return the state of one step, of which few values differ from that of the step before."""
    weight = torch.randn(30_000, generator=torch.Generator().manual_seed(0))
    weight[::50] += step
    return {"w": weight, "tail": torch.arange(9.0) * step, "object": {"step": step}}


class Saving:
    """Training that saves a checkpoint; then the same and a new process go on."""

    def __init__(self, kind):
        self.keep = 2 if kind == "save and delete" else None
        self.saved = None

    def writer(self, root, base=None):
        return codec.torch.checkpoint_writer(root, full_every=3, base=base, keep=self.keep)

    def save(self, writer, root, step):
        try:
            dcp.save(state_of(step), checkpoint_id=root / str(step), storage_writer=writer, no_dist=True)
        except dcp.CheckpointException as e:
            causes = [each[0] for each in e.failures.values()]
            assert all(isinstance(each, (OSError, codec.CodecError, RuntimeError)) for each in causes), causes
            raise codec.StateError(str(e)) from None

    def complete(self, root, loaded=None):
        """Return the steps of all complete checkpoints, after loading the last `loaded` of them; default: all."""
        steps = sorted(int(path.parent.name) for path in root.glob("[0-9]*/.metadata"))
        for step in steps if loaded is None else steps[-loaded:]:
            state = {"w": torch.zeros(30_000), "tail": torch.zeros(9), "object": {"step": -1}}
            dcp.load(state, storage_reader=codec.torch.checkpoint_reader(root / str(step)), no_dist=True)
            expected = state_of(step)
            assert torch.equal(state["w"], expected["w"]), f"step {step} has other values"
            assert torch.equal(state["tail"], expected["tail"])
            assert state["object"] == {"step": step}
            verify_checkpoint(root / str(step))
        return steps

    def prepare(self, root):
        """Write two full checkpoints, with two of changes after the first one: save them once, then copy the files."""
        if self.saved is None:
            self.saved = tempfile.TemporaryDirectory()
            writer = self.writer(Path(self.saved.name))
            for step in range(4):
                self.save(writer, Path(self.saved.name), step)
        shutil.copytree(self.saved.name, root, dirs_exist_ok=True)

    def operate(self, root, armed):
        """Save with the fault, then again in the same process."""
        writer = self.writer(root, root / "3")
        with armed():
            self.save(writer, root, 4)
        assert self.complete(root)[-1] in (3, 4)
        for step in (5, 6):
            self.save(writer, root, step)
            assert self.complete(root, 1)[-1] == step

    def check(self, root, killed):
        """Go on as the next process, from the last complete checkpoint."""
        last = self.complete(root)[-1]
        assert last in ((3, 4) if killed else (6,))
        writer = self.writer(root, root / str(last))
        for step in range(last + 1, last + 4):
            self.save(writer, root, step)
            assert self.complete(root, 1)[-1] == step
        self.complete(root)
        if self.keep is not None:
            assert not [path.name for path in root.iterdir() if path.name.endswith(".deleted")]


OPERATIONS = {"save": Saving, "save and delete": Saving}
