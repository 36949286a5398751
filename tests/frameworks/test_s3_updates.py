"""Updates of weights through S3: moto's server, with requests that fail, and publishers that are killed or compete."""

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import codec
from codec.stores.bucket import ObjectStore
from codec.weight_sync import Publisher, pull
from support.s3_server import KEY, SECRET, s3_server
from support.tiers import HANG_SECONDS, every
from support.weight_updates import equal, published, stepped, weights

FAULTS = ("500 InternalError", "503 SlowDown", "cut", "half", "lost")
TARGETS = {  # method, and part of the object's name or of the query
    "objects": ("GET", "list-type"), "a list": ("GET", "head-"), "an update": ("GET", "update"),
    "a new list": ("PUT", "head-"), "a new update": ("PUT", "update"), "a size": ("HEAD", "update"),
}  # fmt: skip


def is_of(target, method, path):
    """Return True if a request is of a target."""
    wanted, part = TARGETS[target]
    return method == wanted and part in path.rpartition("/")[2]


@pytest.fixture(scope="module")
def server():
    with s3_server() as server:
        yield server


@pytest.fixture
def url(server, request):
    server.fault = lambda method, path: None
    return "s3://bucket/" + re.sub(r"\W+", "-", request.node.name)


def test_receivers_of_any_age_reach_the_last_version(server, url):
    early = codec.WeightReceiver()
    with Publisher(url, snapshot_every=3) as publisher:
        assert pull(early, url) is None
        all_weights = published(publisher, 5)
        assert pull(early, url) == 4
        all_weights.append(stepped(all_weights[-1], 5))
        publisher.publish(all_weights[-1])
    for receiver in (early, codec.WeightReceiver()):
        assert pull(receiver, url) == 5
        assert equal(all_weights[5], receiver.tensors())


def test_large_updates_are_sent_in_parts_and_read_in_blocks(server, url):
    values = np.frombuffer(np.random.default_rng(0).bytes(40 << 20), np.float32)
    with Publisher(url) as publisher:
        server.requests.clear()
        publisher.publish({"w": values})
    assert sum("partNumber" in path for _, path in server.requests) == 3
    receiver = codec.WeightReceiver()
    server.requests.clear()
    assert pull(receiver, url) == 0
    assert sum("snapshot" in path for _, path in server.requests) >= 5
    assert equal({"w": values}, receiver.tensors())


@pytest.mark.parametrize(("target", "fault"), every(7, itertools.product(TARGETS, FAULTS)))
def test_request_that_fails_once_is_repeated(server, url, target, fault):
    failed, receiver = [], codec.WeightReceiver()

    def fail(method, path):
        if not failed and is_of(target, method, path):
            failed.append(path)
            return fault
        return None

    with Publisher(url) as publisher:
        published(publisher, 1)
        pull(receiver, url)
        server.fault = fail
        assert publisher.publish(stepped(weights(), 1)) == 1
        assert pull(receiver, url) == 1
    assert failed
    assert equal(stepped(weights(), 1), receiver.tensors())


@pytest.mark.parametrize("status", ["503 SlowDown", "403 AccessDenied"])
def test_bucket_that_always_fails_is_an_error_without_credentials(server, url, status):
    with Publisher(url) as publisher:
        published(publisher, 1)
        server.fault = lambda method, path: status
        for call in (lambda: publisher.publish(weights()), lambda: pull(codec.WeightReceiver(), url, timeout=20)):
            with pytest.raises(codec.ArgumentError, match=f"{url} cannot be used") as e:
                call()
            assert SECRET not in str(e.value)
            assert KEY not in str(e.value)
            assert e.value.__context__ is None
        server.fault = lambda method, path: None
        assert publisher.publish(stepped(weights(), 1)) == 1
        assert pull(codec.WeightReceiver(), url) == 1


def test_silent_bucket_is_an_error_within_the_timeout(server, url):
    with Publisher(url) as publisher:
        published(publisher, 1)
    answer = threading.Event()
    server.fault = lambda method, path: answer.wait(HANG_SECONDS) and None
    with pytest.raises(codec.ArgumentError, match="does not answer within 1"):
        pull(codec.WeightReceiver(), url, timeout=1)
    answer.set()


def test_bucket_that_is_not_there_is_an_error(server):
    with pytest.raises(codec.ArgumentError, match="cannot be used"):
        Publisher("s3://no-such-bucket/run")
    with pytest.raises(codec.ArgumentError, match="is not a store of updates"):
        pull(codec.WeightReceiver(), "s3://bucket/no-such-run")


_TRAINER = """
import sys
sys.path.insert(0, {tests!r})
from codec.weight_sync import Publisher
from support.weight_updates import stepped, weights
with Publisher({url!r}, base={base!r}, snapshot_every=1) as publisher:
    print(publisher.publish(stepped(weights(), {seed})), flush=True)
"""


def trainer(url, base, seed):
    """Start a process that publishes a version."""
    code = _TRAINER.format(tests=str(Path(__file__).parents[1]), url=url, base=str(base), seed=seed)
    return subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("target", ["a new update", "a new list"])
def test_killed_publisher_leaves_one_version(server, url, tmp_path, when, target):
    """Receivers get the version before or after; the next process goes on with the base of the killed one."""
    processes, receiver = [trainer(url, tmp_path / "base", 1)], codec.WeightReceiver()
    assert processes[0].communicate(timeout=HANG_SECONDS)[0] == "0\n"
    assert pull(receiver, url) == 0
    killed = []

    def kill(method, path):
        if not killed and is_of(target, method, path):
            killed.append(path)
            if when == "after":
                return lambda body: processes[1].send_signal(signal.SIGKILL) or body
            processes[1].send_signal(signal.SIGKILL)
            return "500 InternalError"
        return None

    processes.append(trainer(url, tmp_path / "base", 2))
    server.fault = kill
    assert processes[1].communicate(timeout=HANG_SECONDS)[0] == ""
    assert processes[1].returncode == -signal.SIGKILL
    assert killed
    version = 1 if (when, target) == ("after", "a new list") else 0
    for reader in (receiver, codec.WeightReceiver()):
        assert pull(reader, url) == version
        assert equal(stepped(weights(), version + 1), reader.tensors())
    processes.append(trainer(url, tmp_path / "base", 3))
    assert processes[2].communicate(timeout=HANG_SECONDS)[0] == f"{version + 1}\n"
    assert pull(receiver, url) == version + 1
    assert equal(stepped(weights(), 3), receiver.tensors())


def test_of_two_publishers_one_fails(server, url):
    """Each list has one author: receivers reach the last version that a call has published, and no other weights."""
    barrier, outcomes, receiver = threading.Barrier(2), {}, codec.WeightReceiver()
    publishers = [Publisher(url), Publisher(url)]

    def publish(k, seed):
        barrier.wait(HANG_SECONDS)
        try:
            outcomes[k] = publishers[k].publish(stepped(weights(), seed))
        except codec.StateError:
            outcomes[k] = None
            publishers[k].close()
            publishers[k] = Publisher(url)

    for seed in range(4):
        threads = [threading.Thread(target=publish, args=(k, 10 * k + seed)) for k in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_SECONDS)
        reached = [k for k, version in outcomes.items() if version is not None]
        assert reached
        version = pull(receiver, url)
        assert version == max(outcomes[k] for k in reached)
        [winner] = [k for k in reached if outcomes[k] == version]
        assert equal(stepped(weights(), 10 * winner + seed), receiver.tensors())


def test_publisher_deletes_only_objects_of_its_own(server, url):
    store = ObjectStore(url)
    others = {"0.pt", "head", "head-1", f"{0:020d}.update", "model.safetensors"}
    for name in others:
        store.put(name, b"x")
    with Publisher(url, snapshot_every=1) as publisher:
        published(publisher, 5)
        publisher._store.clear()
    assert {name for name in store.names() if len(name) != len("head-") + 20} == others
    assert os.environ["AWS_ENDPOINT_URL"] == server.url
