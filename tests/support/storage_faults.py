"""Receivers with folders and publishers whose storage fails at a system call; run in a child process with LD_PRELOAD.

:func:`main` tries a fault at each system call of an operation, each in a process of its own. The process with the fault
reports what it sees after the fault; the next process then opens the same folders without faults.
"""

import ctypes
import errno
import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import codec
from codec.weight_sync import Publisher, pull
from support.processes import run
from support.weight_updates import equal, stepped, weights

FAULTS = {
    "ENOSPC once": (0, errno.ENOSPC), "EIO once": (0, errno.EIO), "EINTR once": (0, errno.EINTR),
    "ENOSPC from here": (1, errno.ENOSPC), "EROFS from here": (1, errno.EROFS), "short write": (2, 0),
    "killed before": (3, 0), "killed after": (4, 0),
}  # fmt: skip


def library(folder):
    """Compile the faults to a shared library in `folder`, and return its path."""
    path = Path(folder) / "syscall_faults.so"
    source = Path(__file__).with_name("syscall_faults.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", path, source, "-ldl"], check=True)
    return path


def run_faults(folder, operation, faults, step, module="storage_faults"):
    """Run :func:`main` in a child process with the faults of the library, on an operation of a module's OPERATIONS."""
    tests = Path(__file__).parents[1]
    code = (
        f"sys.path.insert(0, {str(tests)!r})\nfrom support import {module}, storage_faults\n"
        f"storage_faults.main({module}.OPERATIONS, {operation!r}, {faults!r}, {step})\nprint('the end')\n"
    )
    run(code, noise=("<string>:", "  pid = os.fork()"), LD_PRELOAD=str(library(folder)), CODEC_NUM_THREADS="1")


class Receiver:
    """Receiver with a folder that applies one update, and passes it to a program."""

    shared = False
    files = frozenset({"lock", "state", "values"})

    def __init__(self, update):
        sender = codec.WeightSender(weights())
        self.all_weights = [weights(), stepped(weights(), 1), stepped(weights(), 2)]
        self.updates = [bytes(sender.snapshot().data)]
        for new in self.all_weights[1:]:
            self.updates.append(bytes(sender.diff(new).data))
            sender.commit()
            self.updates.append(bytes(sender.snapshot().data))
        first, self.update, self.target = {
            "first snapshot": ([], self.updates[0], 0), "update": ([0], self.updates[1], 1),
            "snapshot": ([0], self.updates[2], 1), "open": ([0, 1], None, 1), "recovery": ([0], None, 1),
        }[update.removeprefix("shared ")]  # fmt: skip
        self.first, self.kind = first, update.removeprefix("shared ")

    def open(self, root):
        """Open the folder."""
        return codec.WeightReceiver(folder=root / "rollout", shared=self.shared)

    def prepare(self, root):
        """Write the folder in which the operation begins."""
        with self.open(root) as receiver:
            for k in self.first:
                receiver.apply(self.updates[k])
        if self.kind == "recovery":  # a process that was killed inside an update
            if (pid := os.fork()) == 0:
                receiver = self.open(root)
                original, calls = receiver._base.write, []

                def write(*args):
                    calls.append(None)
                    if len(calls) == 4:
                        os.kill(os.getpid(), signal.SIGKILL)
                    original(*args)

                receiver._base.write = write
                receiver.apply(self.updates[1])
            os.waitpid(pid, 0)

    def operate(self, root, armed):
        """Run the operation with the fault, then go on in the same process."""
        program = {name: x.copy() for name, x in self.all_weights[0].items()} if self.first else {}
        receiver = None if self.kind in ("open", "recovery") else self.open(root)
        if receiver is not None and self.first:
            receiver.reload(program.update)
        with armed():
            if receiver is None:
                receiver = self.open(root)
                receiver.reload(program.update)
            else:
                receiver.apply(self.update, program.update)
        if receiver is None:
            receiver = self.open(root)
        version = receiver.version
        if version is None:
            assert self.kind == "first snapshot"
        else:
            assert version in (self.target, self.target - 1)
            assert equal(self.all_weights[version], receiver.tensors()), "other weights in the same process"
            assert not receiver.unloaded or self.kind in ("open", "recovery"), "the program lacks tensors"
            if not receiver.unloaded:
                assert equal(self.all_weights[version], program), "the program does not serve the version"
        self.proceed(receiver, program)

    def proceed(self, receiver, program):
        """Bring the receiver to the last version."""
        for update in self.updates[0:1] + self.updates[1::2]:
            try:
                receiver.apply(update, program.update)
            except codec.StateError as e:
                if "applied already" not in str(e) and "not newer" not in str(e):
                    raise
        if receiver.unloaded:
            receiver.reload(program.update, names=receiver.unloaded)
        assert equal(self.all_weights[2], receiver.tensors()), "cannot go on"
        assert equal(self.all_weights[2], program), "the program cannot go on"
        receiver.close()

    def check(self, root, killed):
        """Open the folder as the next process."""
        with self.open(root) as receiver:
            if killed:
                assert receiver.version in ({None, 0} if not self.first else {self.target, self.target - 1})
            if receiver.version is not None:
                assert equal(self.all_weights[receiver.version], receiver.tensors()), (
                    "other weights in the next process"
                )
            self.proceed(receiver, {})
        left = {p.name.partition("-")[0] for p in (root / "rollout").iterdir()}
        assert left == self.files, left


class SharedReceiver(Receiver):
    """Receiver that shares its folder with others, which have the same version when it begins."""

    shared = True
    files = frozenset({"lock", "state", "values", "preparing", "committing"})

    def operate(self, root, armed):
        """Run the operation with the fault; the other receivers are not affected."""
        other = self.open(root)
        before = dict(other.tensors())
        super().operate(root, armed)
        assert equal(before, other.tensors()), "another receiver has other weights"
        self.proceed(other, {})


class Publication:
    """Publisher that publishes one version; then the same and a new process go on."""

    def __init__(self, kind):
        self.in_folder = kind.endswith("folder")
        self.first = kind.startswith("first")

    def prepare(self, root):
        """Write nothing: the process with the fault makes its own publisher."""

    def publisher(self, root):
        base = root / "base" if self.in_folder else None
        return Publisher(root / "store", base=base, snapshot_every=2)

    def operate(self, root, armed):
        """Publish a version with the fault, then others in the same process."""
        early = codec.WeightReceiver()
        if self.first:
            publisher = None
            with armed():
                publisher = self.publisher(root)
                publisher.publish(stepped(weights(), 6))
            publisher = publisher or self.publisher(root)
        else:
            publisher = self.publisher(root)
            for k in range(6):
                publisher.publish(stepped(weights(), k))
            pull(early, root / "store")
            with armed():
                publisher.publish(stepped(weights(), 6))
        before = publisher.version
        for k in (7, 8):
            version = publisher.publish(stepped(weights(), k))
            assert before is None or version > before, "a version was used again"
            self.pulled(root, early, k)
            before = version
        publisher.close()

    def pulled(self, root, early, k):
        for receiver in (early, codec.WeightReceiver()):
            pull(receiver, root / "store")
            assert equal(stepped(weights(), k), receiver.tensors()), "a receiver has other weights"

    def check(self, root, killed):
        """Publish as the next process."""
        early = codec.WeightReceiver()
        if (root / "store" / "head").exists():
            pull(early, root / "store")
        with self.publisher(root) as publisher:
            publisher.publish(stepped(weights(), 9))
            self.pulled(root, early, 9)
        others = [p.name for p in root.rglob("*") if p.name.endswith(".tmp") or p.name in ("pending", "piece", "next")]
        assert not others, others


OPERATIONS = {
    **{kind: Receiver for kind in ("first snapshot", "update", "snapshot", "open", "recovery")},
    **{f"shared {kind}": SharedReceiver for kind in ("first snapshot", "update", "snapshot")},
    **{kind: Publication for kind in ("base in memory", "base in a folder", "first, base in a folder")},
}


class Armed:
    """Context with a fault; errors of the library end the context, other exceptions go on."""

    def __init__(self, faults, root, point, how, number):
        self._faults, self._arm = faults, (str(root).encode(), point, how, number)
        self.count, self.error = 0, None

    def __enter__(self):
        self._faults.fault_arm(*self._arm)

    def __exit__(self, kind, error, trace):
        self.count = self._faults.fault_disarm()
        self.error = error
        return isinstance(error, codec.CodecError)


def attempt(operation, root, point, fault):
    """Try a fault at one point in a child process; return True if the point was reached."""
    faults = ctypes.CDLL(None)
    faults.fault_last.restype = ctypes.c_char_p
    operation.prepare(root)
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        armed = Armed(faults, root, point, *FAULTS[fault])
        problem = None
        try:
            operation.operate(root, lambda: armed)
        except BaseException as e:
            problem = f"{type(e).__name__}: {e}"
        last = faults.fault_last().decode().replace(str(root), "")
        os.write(writer, json.dumps([armed.count, problem, last, str(armed.error)]).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as f:
        report = f.read()
    _, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status)
    count, problem, last, error = [point + 1, None, "", ""] if killed else json.loads(report)
    where = f"{last}, {fault}, call {point}: {error}"
    assert problem is None, f"{where}: {problem}"
    try:
        operation.check(root, killed)
    except Exception as e:
        raise AssertionError(f"{where}: in the next process: {type(e).__name__}: {e}") from e
    return count > point


def main(operations, name, faults, step):
    """Try faults at every `step`-th system call of an operation; the first point differs between faults."""
    problems, cases = [], 0
    operation = operations[name](name)
    for k, fault in enumerate(faults):
        point, reached = k * 7 % step, True
        while reached:
            root = Path(tempfile.mkdtemp())
            try:
                reached = attempt(operation, root, point, fault)
            except AssertionError as e:
                problems.append(str(e))
            shutil.rmtree(root)
            point += step
            cases += 1
    print(f"{cases} cases")
    assert not problems, f"{len(problems)} of {cases} cases\n" + "\n".join(problems[:20])
