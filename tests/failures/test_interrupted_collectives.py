"""Ctrl-C in a collective raises KeyboardInterrupt on that rank and PeerError on others; no tensor is half written."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import codec
import codec.torch
from codec.torch.group import communicator
from support import rank_loss
from support.faults import at_fault_point, freeze
from support.rank_loss import (
    FAULT_POINTS,
    FAULTY,
    PROMISED_SECONDS,
    SLACK_SECONDS,
    TIMEOUT,
    channel,
    digest,
    fault_points,
    values,
)
from support.ranks import RankPool
from support.tiers import HANG_SECONDS, nightly


def interrupt():
    """Send SIGINT to this process."""
    os.kill(os.getpid(), signal.SIGINT)


def _interrupted(rank, size, point):
    """Interrupt an all-reduce; return the error's name or None, the tensor's digest, and the duration in seconds."""
    x, raised = values(rank), None
    begin = time.monotonic()
    try:
        with at_fault_point(channel(), point if rank == FAULTY else -1, interrupt):
            codec.torch.all_reduce(x, codec.Quantize(4), op="mean", options=codec.options(algorithm="two_shot"))
    except (codec.PeerError, KeyboardInterrupt) as e:
        raised = type(e).__name__
    now, took = digest(x), time.monotonic() - begin
    if raised == "KeyboardInterrupt":  # work in flight must not write to the tensor
        communicator.communicator_of(None).worker.submit(int).wait()
        assert digest(x) == now
    return raised, now, took


def test_ctrl_c_during_an_all_reduce_raises_on_all():
    with RankPool(3) as ranks:
        ranks.new_group()
        want = ranks.run(rank_loss.undisturbed_all_reduce, "two_shot", codec.Quantize(4))
        before = [digest(values(r)) for r in range(3)]
        for point in fault_points(want[FAULTY][1], FAULT_POINTS or 8):
            ranks.new_group()
            ranks.run(rank_loss.connect)
            found = ranks.run(_interrupted, point)
            for rank, (raised, now, took) in enumerate(found):
                # if all frames had arrived, the other ranks have the result, and the interrupted rank may have it, too
                either = {None: [want[rank][0]], "PeerError": [before[rank]]}
                if rank == FAULTY:
                    either = {"KeyboardInterrupt": [before[rank], want[rank][0]]}
                assert now in either[raised], (point, found)
                assert took < PROMISED_SECONDS + SLACK_SECONDS, (point, found)
            ranks.new_group()
            assert ranks.run(rank_loss.undisturbed_all_reduce, "two_shot", codec.Quantize(4)) == want


def _wait_again(rank, size, point):
    """An interrupted wait() does not end the collective: a second wait() succeeds."""
    x, interrupted, gate = values(rank), False, threading.Event()
    # Blocks the worker thread, so that the collective starts only once the rank waits for it
    communicator.communicator_of(None).worker.submit(gate.wait)
    pending = codec.torch.all_reduce(
        x, codec.Quantize(4), async_op=True, op="mean", options=codec.options(algorithm="two_shot")
    )
    try:
        with at_fault_point(channel(), point if rank == FAULTY else -1, interrupt):
            gate.set()
            pending.wait()
    except KeyboardInterrupt:
        interrupted = True
    assert pending.result()[0] is x
    return interrupted, digest(x)


def test_ctrl_c_during_a_wait_does_not_end_the_collective():
    with RankPool(3) as ranks:
        ranks.new_group()
        want = ranks.run(rank_loss.undisturbed_all_reduce, "two_shot", codec.Quantize(4))
        for point in fault_points(want[FAULTY][1], FAULT_POINTS or 8):
            found = ranks.run(_wait_again, point)
            assert found == [(rank == FAULTY, want[rank][0]) for rank in range(3)], point


def _connecting(rank, size):
    """Interrupt ranks that are connecting to a frozen rank."""
    if rank == FAULTY:
        freeze()
    connect = communicator.Channel

    def interrupted(*args):
        interrupt()
        return connect(*args)

    if rank != FAULTY:
        communicator.Channel = interrupted
    with pytest.raises(codec.PeerError if rank == FAULTY else KeyboardInterrupt):
        codec.torch.all_reduce(values(rank), op="mean", options=codec.options(timeout=TIMEOUT))
    communicator.Channel = connect


def test_ctrl_c_while_connecting_raises_keyboard_interrupt():
    with RankPool(3) as ranks:
        ranks.new_group()
        ranks.start(_connecting)
        ranks.results([r for r in range(3) if r != FAULTY])
        ranks[FAULTY].resume()
        ranks.results([FAULTY])
        ranks.new_group()
        assert (
            len({result for result, *_ in ranks.run(rank_loss.undisturbed_all_reduce, "two_shot", codec.Quantize(4))})
            == 1
        )


def _train_interrupted(rank, size, point):
    """Interrupt a training step; return the error's name or None, the seconds, and the states before and after."""
    before, raised = rank_loss.current_training().state(), None
    line = communicator.communicator_of(rank_loss.current_training().model.process_group)
    begin = time.monotonic()
    try:
        with at_fault_point(line.channel, point if rank == FAULTY else -1, interrupt):
            rank_loss.current_training().step(rank)
    except (codec.PeerError, KeyboardInterrupt) as e:
        raised = type(e).__name__
    took = time.monotonic() - begin
    return raised, took, before, rank_loss.current_training().state()


def test_ctrl_c_during_a_training_step_leaves_it_undone_or_complete():
    with RankPool(3) as ranks:
        ranks.new_group()
        saved = [s for _, _, s in ranks.run(rank_loss.train, None, 2)]
        want = []
        for done in range(2):
            ranks.new_group()
            want.append(ranks.run(rank_loss.train, saved, done + 1))
        most = FAULT_POINTS or 8
        for i in range(most):
            done = i % 2
            point = fault_points(want[done][FAULTY][1], most)[i]
            ranks.new_group()
            ranks.run(rank_loss.train, saved, done)
            found = ranks.run(_train_interrupted, point)
            through = i == most - 1 or all(raised is None for raised, _, _, _ in found[:FAULTY] + found[FAULTY + 1 :])
            for rank, (raised, took, before, now) in enumerate(found):
                expected = ("KeyboardInterrupt",) if rank == FAULTY else ("PeerError", None)
                assert raised in expected, (point, found)
                after = want[done][rank][0][-1]
                assert now == (before if raised else after) or (rank == FAULTY and through), (point, found)
                # After an interrupt once all ranks have succeeded, the model is unchanged, and residuals may be new.
                assert raised is None or now in (before, (*before[:2], after[2])), (point, found)
                assert took < PROMISED_SECONDS + SLACK_SECONDS, (point, found)
            ranks.new_group()
            assert [states for states, _, _ in ranks.run(rank_loss.train, saved, done + 1)] == [
                w[0] for w in want[done]
            ]


def _interrupted_between_buckets(rank, size):
    """Interrupt the backward pass after the first buckets are reduced and before the last one."""
    now = rank_loss.current_training()
    line = communicator.communicator_of(now.model.process_group)

    def midway(*_):
        line.worker.submit(int).wait()  # wait until earlier buckets are reduced
        interrupt()

    hooks = [now.net[3].register_full_backward_hook(midway)] if rank == FAULTY else []
    before = now.state()
    with pytest.raises(KeyboardInterrupt if rank == FAULTY else codec.PeerError):
        now.step(rank)
    assert now.state() == before
    for hook in hooks:
        hook.remove()


def test_interrupted_backward_leaves_residuals_unchanged():
    """Residuals survive an interrupted backward, in the step in which workers send residuals to slice owners."""
    with RankPool(3) as ranks:
        ranks.new_group()
        saved = [s for _, _, s in ranks.run(rank_loss.train, None, 2)]
        ranks.new_group()
        want = [states for states, _, _ in ranks.run(rank_loss.train, saved, 2)]
        ranks.new_group()
        ranks.run(rank_loss.train, saved, 1)
        ranks.run(_interrupted_between_buckets)
        ranks.new_group()
        assert [states for states, _, _ in ranks.run(rank_loss.train, saved, 2)] == want


SCRIPT = """
import os, signal, sys, torch, torch.distributed as dist, codec.torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
torch.set_num_threads(1)
if len(sys.argv) > 1:
    path, rank, size = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=int(rank), world_size=int(size))
else:
    dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
layers = [m for _ in range(6) for m in (torch.nn.Linear(256, 256), torch.nn.GELU())]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.3)
options = codec.options(algorithm="two_shot")
codec.torch.ddp_hook(codec.Quantize(4), feedback=True, options=options).register(model)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
while True:
    optimizer.zero_grad()
    model(torch.randn(64, 256)).square().mean().backward()
    optimizer.step()
    os.write(1, f"{dist.get_rank()} {os.getpid()}\\n".encode())  # one write per line, since all ranks share the pipe
"""
NEVER = ("terminate called", "Fatal Python error", "Exception ignored", "Segmentation")


def step_lines(pipe):
    """Yield rank and process id of every printed step, until no line arrives for one second."""
    while select.select([pipe], [], [], 1)[0] and (line := pipe.readline()):
        yield [int(number) for number in line.split()]


def start(command, **how):
    """Start a command in a new session, with pipes for stdout and stderr."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "bufsize": 1}
    # If this process is a shell's background job, it ignores SIGINT, which the child would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes, **how)


def wait_for_exit(process):
    """Wait for a process, and return its exit status and stderr."""
    try:
        _, said = process.communicate(timeout=HANG_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"it did not end:\n{process.communicate()[1]}")
    assert not any(bad in said for bad in NEVER), said
    return process.returncode, said


@pytest.mark.parametrize("who", ["one", nightly("all"), nightly("one beside a frozen one")])
def test_ctrl_c_ends_all_training_processes(who, tmp_path):
    command = [sys.executable, "-P", "-c", SCRIPT, str(tmp_path / "store")]
    processes = [start([*command, str(rank), "2"]) for rank in range(2)]
    for p in processes:
        for _ in range(3):
            p.stdout.readline()
    hit = processes if who == "all" else processes[:1]
    if "frozen" in who:
        processes[1].send_signal(signal.SIGSTOP)
        # The loop ends when rank 0 waits for the frozen rank and prints no more steps
        for _ in step_lines(processes[0].stdout):
            pass
    # Processes are stopped first, so that none exits before all have received SIGINT, as from a terminal.
    for sent in (signal.SIGSTOP, signal.SIGINT, signal.SIGCONT):
        for p in hit:
            p.send_signal(sent)
    for p in processes if who != "one beside a frozen one" else hit:
        status, said = wait_for_exit(p)
        if p in hit:
            assert status == -signal.SIGINT, said
            assert said.rstrip().endswith("KeyboardInterrupt"), said
        else:
            assert status == 1, said
            assert "PeerError" in said, said
    for p in processes:
        p.kill()
        p.communicate()


@pytest.mark.nightly
@pytest.mark.parametrize("who", ["one", "all"])
def test_ctrl_c_ends_training_under_torchrun(who, tmp_path):
    """Ctrl-C ends training under torchrun. `all`: the whole process group gets the signal, as from a terminal."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = start([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script])
    seen = {}
    while len(seen) < 2:
        rank, process = map(int, run.stdout.readline().split())
        seen[rank] = process
    if who == "one":
        os.kill(seen[1], signal.SIGINT)
    else:
        os.killpg(run.pid, signal.SIGINT)
    status, said = wait_for_exit(run)
    assert status, said
    assert "KeyboardInterrupt" in said, said
    assert not any(Path(f"/proc/{process}").exists() for process in seen.values()), said
