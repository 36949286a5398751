"""Ctrl-C: KeyboardInterrupt where it was pressed, whatever peers do; all ranks end, and nothing is half written."""

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
from codec.torch import collectives, communicator
from support import rank_loss
from support.faults import at_event, freeze
from support.rank_loss import FAULT_POINTS, PROMISED, SLACK, TIMEOUT, VICTIM, channel, digest, spread, values
from support.ranks import Team
from support.tiers import HANG_SECONDS, nightly


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def _interrupted(rank, size, moment):
    """What was raised, after how long, and what became of the tensor."""
    x, raised = values(rank), None
    begin = time.monotonic()
    try:
        with at_event(channel(), moment if rank == VICTIM else -1, interrupt):
            codec.torch.all_reduce(x, codec.Quantize(4), algorithm="two_shot")
    except (codec.PeerError, KeyboardInterrupt) as e:
        raised = type(e).__name__
    now, took = digest(x), time.monotonic() - begin
    if raised == "KeyboardInterrupt":  # what may be going on does not write to it any more
        collectives.line_of(None).worker.submit(int).wait()
        assert digest(x) == now
    return raised, now, took


def test_ctrl_c_in_an_all_reduce():
    with Team(3) as team:
        team.regroup()
        want = team.all(rank_loss.undisturbed_all_reduce, "two_shot", codec.Quantize(4))
        before = [digest(values(r)) for r in range(3)]
        for moment in spread(want[VICTIM][1], FAULT_POINTS or 8):
            team.regroup()
            team.all(rank_loss.connect)
            found = team.all(_interrupted, moment)
            for rank, (raised, now, took) in enumerate(found):
                # the others have the result if all was there; the one that stopped may have it, too
                either = {None: [want[rank][0]], "PeerError": [before[rank]]}
                if rank == VICTIM:
                    either = {"KeyboardInterrupt": [before[rank], want[rank][0]]}
                assert now in either[raised], (moment, found)
                assert took < PROMISED + SLACK, (moment, found)
            team.regroup()
            assert team.all(rank_loss.undisturbed_all_reduce, "two_shot", codec.Quantize(4)) == want


def _wait_again(rank, size, moment):
    """An interrupted wait is no end of the collective."""
    x, interrupted, gate = values(rank), False, threading.Event()
    collectives.line_of(None).worker.submit(gate.wait)  # the interrupt comes when there is something to wait for
    pending = codec.torch.all_reduce(x, codec.Quantize(4), algorithm="two_shot", async_op=True)
    try:
        with at_event(channel(), moment if rank == VICTIM else -1, interrupt):
            gate.set()
            pending.wait()
    except KeyboardInterrupt:
        interrupted = True
    assert pending.wait() is x
    return interrupted, digest(x)


def test_ctrl_c_while_waiting_for_what_goes_on_in_the_background():
    with Team(3) as team:
        team.regroup()
        want = team.all(rank_loss.undisturbed_all_reduce, "two_shot", codec.Quantize(4))
        for moment in spread(want[VICTIM][1], FAULT_POINTS or 8):
            found = team.all(_wait_again, moment)
            assert found == [(rank == VICTIM, want[rank][0]) for rank in range(3)], moment


def _connecting(rank, size):
    """While connections are made to one that does not answer."""
    if rank == VICTIM:
        freeze()
    connect = communicator.Channel

    def interrupted(*args):
        interrupt()
        return connect(*args)

    if rank != VICTIM:
        communicator.Channel = interrupted
    with pytest.raises(codec.PeerError if rank == VICTIM else KeyboardInterrupt):
        codec.torch.all_reduce(values(rank), timeout=TIMEOUT)
    communicator.Channel = connect


def test_ctrl_c_before_all_are_connected():
    with Team(3) as team:
        team.regroup()
        team.begin(_connecting)
        team.answers([r for r in range(3) if r != VICTIM])
        team[VICTIM].thaw()
        team.answers([VICTIM])
        team.regroup()
        assert (
            len({result for result, *_ in team.all(rank_loss.undisturbed_all_reduce, "two_shot", codec.Quantize(4))})
            == 1
        )


def _train_interrupted(rank, size, moment):
    before, raised = rank_loss.current_training().state(), None
    line = collectives.line_of(rank_loss.current_training().model.process_group)
    begin = time.monotonic()
    try:
        with at_event(line.channel, moment if rank == VICTIM else -1, interrupt):
            rank_loss.current_training().step(rank)
    except (codec.PeerError, KeyboardInterrupt) as e:
        raised = type(e).__name__
    took = time.monotonic() - begin
    return raised, took, before, rank_loss.current_training().state()


def test_ctrl_c_in_a_training_step():
    with Team(3) as team:
        team.regroup()
        saved = [s for _, _, s in team.all(rank_loss.train, None, 2)]
        want = []
        for done in range(2):
            team.regroup()
            want.append(team.all(rank_loss.train, saved, done + 1))
        most = FAULT_POINTS or 8
        for i in range(most):
            done = i % 2
            moment = spread(want[done][VICTIM][1], most)[i]
            team.regroup()
            team.all(rank_loss.train, saved, done)
            found = team.all(_train_interrupted, moment)
            through = i == most - 1 or all(raised is None for raised, _, _, _ in found[:VICTIM] + found[VICTIM + 1 :])
            for rank, (raised, took, before, now) in enumerate(found):
                expected = ("KeyboardInterrupt",) if rank == VICTIM else ("PeerError", None)
                assert raised in expected, (moment, found)
                after = want[done][rank][0][-1]
                assert now == (before if raised else after) or (rank == VICTIM and through), (moment, found)
                # pressed when all ranks had all: the model is as before the step, what is owed perhaps as after it
                assert raised is None or now in (before, (*before[:2], after[2])), (moment, found)
                assert took < PROMISED + SLACK, (moment, found)
            team.regroup()
            assert [states for states, _, _ in team.all(rank_loss.train, saved, done + 1)] == [w[0] for w in want[done]]


def _broken_off(rank, size):
    """After the first buckets, before the last one."""
    now = rank_loss.current_training()
    line = collectives.line_of(now.model.process_group)

    def midway(*_):
        line.worker.submit(int).wait()  # those that came first are reduced
        interrupt()

    hooks = [now.net[3].register_full_backward_hook(midway)] if rank == VICTIM else []
    before = now.state()
    with pytest.raises(KeyboardInterrupt if rank == VICTIM else codec.PeerError):
        now.step(rank)
    assert now.state() == before
    for hook in hooks:
        hook.remove()


def test_what_is_owed_is_as_before_a_backward_that_was_broken_off():
    """In the step after buckets were rebuilt, when ranks hand over what they owe to sums."""
    with Team(3) as team:
        team.regroup()
        saved = [s for _, _, s in team.all(rank_loss.train, None, 2)]
        team.regroup()
        want = [states for states, _, _ in team.all(rank_loss.train, saved, 2)]
        team.regroup()
        team.all(rank_loss.train, saved, 1)
        team.all(_broken_off)
        team.regroup()
        assert [states for states, _, _ in team.all(rank_loss.train, saved, 2)] == want


SCRIPT = """
import os, signal, sys, torch, torch.distributed as dist, codec.torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in a shell's background
torch.set_num_threads(1)
if len(sys.argv) > 1:
    path, rank, size = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=int(rank), world_size=int(size))
else:
    dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
layers = [m for _ in range(6) for m in (torch.nn.Linear(256, 256), torch.nn.GELU())]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.3)
codec.torch.ddp_hook(codec.Quantize(4), feedback=True, algorithm="two_shot").register(model)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
while True:
    optimizer.zero_grad()
    model(torch.randn(64, 256)).square().mean().backward()
    optimizer.step()
    os.write(1, f"{dist.get_rank()} {os.getpid()}\\n".encode())  # whole lines, of all ranks in one pipe
"""
NEVER = ("terminate called", "Fatal Python error", "Exception ignored", "Segmentation")


def lines_of(pipe):
    """Rank and process of every step, until no more come for a while."""
    while select.select([pipe], [], [], 1)[0] and (line := pipe.readline()):
        yield [int(number) for number in line.split()]


def started(command, **how):
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "bufsize": 1}
    # Background jobs of a shell, this process perhaps, ignore SIGINT, and the child would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes, **how)


def ended(process):
    """Its exit status and what it said."""
    try:
        _, said = process.communicate(timeout=HANG_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"it did not end:\n{process.communicate()[1]}")
    assert not any(bad in said for bad in NEVER), said
    return process.returncode, said


@pytest.mark.parametrize("who", ["one", nightly("all"), nightly("one beside a frozen one")])
def test_ctrl_c_ends_training(who, tmp_path):
    command = [sys.executable, "-P", "-c", SCRIPT, str(tmp_path / "store")]
    processes = [started([*command, str(rank), "2"]) for rank in range(2)]
    for p in processes:
        for _ in range(3):
            p.stdout.readline()
    hit = processes if who == "all" else processes[:1]
    if "frozen" in who:
        processes[1].send_signal(signal.SIGSTOP)
        for _ in lines_of(processes[0].stdout):  # until it waits
            pass
    for p in hit:
        p.send_signal(signal.SIGINT)
    for p in processes if who != "one beside a frozen one" else hit:
        status, said = ended(p)
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
def test_ctrl_c_ends_training_by_torchrun(who, tmp_path):
    """`all`: what a terminal does, to torchrun and whatever else is in its process group."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = started([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script])
    seen = {}
    while len(seen) < 2:
        rank, process = map(int, run.stdout.readline().split())
        seen[rank] = process
    if who == "one":
        os.kill(seen[1], signal.SIGINT)
    else:
        os.killpg(run.pid, signal.SIGINT)
    status, said = ended(run)
    assert status, said
    assert "KeyboardInterrupt" in said, said
    assert not any(Path(f"/proc/{process}").exists() for process in seen.values()), said
