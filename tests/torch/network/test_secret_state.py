"""The secret of real ranks is in no state, text, log, pickle or traceback, and children of a launcher prove it."""

import io
import logging
import os
import pickle
import subprocess
import sys
import traceback

import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch
from codec.torch.group.communicator import communicator_of
from codec.torch.network.endpoint import endpoint_of
from support.point_to_point import SOON
from support.ranks import run_ranks
from support.tiers import HANG_SECONDS, nightly

KEY, OLD = "key-0123456789abcdef-of-ranks", "old-0123456789abcdef-of-ranks"
FORMS = [
    form for key in (KEY, OLD) for form in (key[4:14], key.encode().hex()[8:28], str(list(key[4:14].encode()))[1:-1])
]


def _leaks(text):
    return [form for form in FORMS if form in text]


def _pickled(thing):
    """Return the pickle of an object as text, or the error with which it refuses to be pickled."""
    try:
        return pickle.dumps(thing).decode("latin-1")
    except Exception as e:
        return "".join(traceback.TracebackException.from_exception(e, capture_locals=True).format())


def _states(options, level):
    """Communicate with options, in training or, with torch's level DETAIL, collectives; return the group and states.

    DistributedDataParallel of torch 2.13 for CPUs crashes with DETAIL, also without codec.
    """
    group = dist.new_group()
    if level == "DETAIL":
        x = torch.ones(1000)
        codec.torch.all_reduce(x, codec.Quantize(4), group=group, options=options)
        return group, {}
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(30, 20), process_group=group)
    optimizer = torch.optim.Adam(model.parameters())
    hook = codec.torch.ddp_hook(codec.Quantize(4), feedback=True, options=options)
    hook.register(model)
    for _ in range(2):
        model(torch.ones(3, 30)).sum().backward()
        optimizer.step()
    saved = io.BytesIO()
    torch.save([hook.state_dict(), optimizer.state_dict()], saved)
    states = {"hook": hook, "stats": hook.stats(), "hook's state": hook.state_dict(), "model": model.module}
    return group, states | {"optimizer": optimizer, "saved": saved.getvalue()}


def _leaking(rank, size, level):
    """Communicate with a secret and TLS; return the texts in which a part of the secret occurs, and their number."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger().addHandler(handler)
    levels = {name: logging.getLogger(name).level for name in (None, "codec", "codec.torch", "torch.distributed")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.DEBUG)
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = level
    dist.set_debug_level_from_env()
    try:
        options = codec.options(secret=KEY, tls="psk", timeout=SOON)
        group, states = _states(options, level)
        endpoint = endpoint_of(group)
        assert endpoint.security.secret == options.security.secret
        with pytest.raises(codec.CodecError) as raised:  # the other rank passes another number of values
            codec.torch.all_reduce(torch.ones(5 + rank), group=group, options=codec.options(timeout=SOON))
        error = traceback.TracebackException.from_exception(raised.value, capture_locals=True)
        texts = {"log": log.getvalue(), "traceback": "".join(error.format(chain=True))}
        states |= {"options": options, "endpoint": endpoint, "communicator": communicator_of(group), "group": group}
        for name, state in states.items():
            texts[f"repr of {name}"] = f"{state!r} {state} {getattr(state, '__dict__', '')}"
            texts[f"pickle of {name}"] = _pickled(state)
        return {name: _leaks(text) for name, text in texts.items() if _leaks(text)}, len(texts)
    finally:
        logging.getLogger().removeHandler(handler)
        for name, number in levels.items():
            logging.getLogger(name).setLevel(number)


@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
def test_secret_is_in_no_text_state_or_pickle(level):
    for leaks, count in run_ranks(2, _leaking, level, fresh=True):
        assert leaks == {}
        assert count >= 10


def test_doctor_prints_no_secret():
    environment = {**os.environ, "CODEC_SECRET": KEY}
    for arguments in (["doctor"], ["doctor", "--json"]):
        command = [sys.executable, "-P", "-m", "codec", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, check=True)
        assert b"authenticated" in done.stdout
        assert _leaks((done.stdout + done.stderr).decode()) == []


TRAINING = """
import torch, torch.distributed as dist
import codec.torch
from codec.torch.network.endpoint import endpoint_of

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.ones(1000)
codec.torch.all_reduce(x)
assert x.eq(2).all()
print(f"rank {rank}: {endpoint_of(dist.group.WORLD).security}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("launcher", [nightly("torch.distributed.run"), nightly("codec.run")])
def test_children_of_a_launcher_prove_the_secret_of_its_environment(launcher, tmp_path):
    program, secret = tmp_path / "train.py", tmp_path / "secret"
    program.write_text(TRAINING)
    secret.touch(0o600)
    secret.write_text(KEY)
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "codec.run", "--codec", "small"] if launcher == "codec.run" else []
    environment = {**os.environ, "CODEC_SECRET_FILE": str(secret), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command += [str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank}: not encrypted, authenticated" in done.stdout
    assert _leaks(done.stdout + done.stderr) == []


# Rotation


def _rotated(rank, size, keys):
    """Communicate with a secret of this rank; return the error, and the lines of the log."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("codec.torch").addHandler(handler)
    os.environ["CODEC_SECRET"] = keys[rank]
    try:
        x = torch.ones(10)
        codec.torch.all_reduce(x, options=codec.options(timeout=2.0 if len(set(keys)) > 1 else SOON))
        return "", lines
    except codec.PeerError as e:
        return str(e), lines
    finally:
        del os.environ["CODEC_SECRET"]
        logging.getLogger("codec.torch").removeHandler(handler)


@pytest.mark.parametrize("late", [0, 1])
def test_rank_with_the_old_secret_is_named_until_it_has_the_new_one(late):
    keys = [KEY, KEY]
    keys[late] = OLD
    (zero, first), (one, second) = run_ranks(2, _rotated, keys)
    assert "rank 0 at 127.0.0.1" in one
    assert "has not proven the secret of this rank: set the same secret (CODEC_SECRET_FILE) on all ranks" in one
    assert "rank 1 has not connected within the timeout: refused a connection from" in zero
    assert _leaks("".join([zero, one, *first, *second])) == []
    assert [error for error, _ in run_ranks(2, _rotated, [KEY, KEY])] == ["", ""]
