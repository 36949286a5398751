"""If parameter-server workers or servers die, are interrupted or never connect, the others raise or continue."""

import itertools
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch
from support.faults import KILLED, die
from support.parameter_servers import SOON, TERNARY, gradients
from support.ranks import RankPool
from support.tiers import NIGHTLY


def training(client, worker, workers, victim, point, steps=6):
    """Average gradients; worker `victim` dies before it sends request number `point` (-1: never)."""
    links = client._session.links
    count = 0
    send = links._try

    def counted(server, lost, call):
        nonlocal count
        if worker == victim and count == point:
            die()
        count += 1
        return send(server, lost, call)

    links._try = counted
    client.init(gradients(worker))
    found = []
    for step in range(steps):
        begin = time.monotonic()
        try:
            mean = client.average(step, gradients(worker, step), TERNARY)
            found.append([mean[k].tolist() for k in sorted(mean)])
        except codec.PeerError:
            found.append("PeerError")
        assert time.monotonic() - begin < SOON
    return found, count


def _killed(rank, size, servers, victim, point):
    ranks, options = list(range(servers)), codec.options(timeout=SOON)
    if rank in ranks:
        server = codec.torch.ParameterServer(ranks, list(range(servers, size)), options=options)
        server.serve()
        return server.stats().lost_workers
    with codec.torch.ParameterClient(ranks, options=options) as client:
        return training(client, rank - servers, size - servers, victim, point)


@pytest.mark.parametrize("servers", [1, 2])
def test_worker_that_dies_leaves_the_others_in_agreement(servers):
    """The other workers raise in the same steps, receive bit-identical means in the rest, and finish all steps."""
    points = 60 if NIGHTLY else 5  # number of fault points; ten in the default run: five per number of servers
    with RankPool(servers + 3, timeout=SOON) as pool:
        pool.new_group()
        total = pool.run(_killed, servers, 2, -1)[servers + 2][1]
        failed = 0
        for i in range(points):
            pool.new_group()
            point = i * (total - 1) // (points - 1)
            pool.start(_killed, servers, 2, point)
            first, second = (f for f, _ in pool.results([servers, servers + 1]))
            assert first == second, point
            # Each server detects the loss on its own: the step that it has in progress fails, and no later step.
            # Different servers may be in different steps (protocol/point-to-point.md, section 2.4).
            assert first.count("PeerError") <= servers, point
            failed += first.count("PeerError")
            assert all(list(lost) == [servers + 2] for lost in pool.results(range(servers))), point
            assert pool.results([servers + 2]) == [KILLED]
            pool.replace(servers + 2)
        assert failed


def _server_dies(rank, size, point):
    ranks, options = [0, 1], codec.options(timeout=SOON)
    if rank in ranks:
        server = codec.torch.ParameterServer(ranks, [2, 3], options=options)
        if rank == 1:
            answer, count = server._perform, 0

            def counted(*args):
                nonlocal count
                if count == point:
                    die()
                count += 1
                return answer(*args)

            server._perform = counted
        with pytest.raises(codec.PeerError, match="no worker is left"):
            server.serve()
        return None
    begin, done = time.monotonic(), []

    def train():
        with codec.torch.ParameterClient(ranks, options=options) as client:
            client.init(gradients(rank))
            for step in range(4):
                done.append(client.average(step, gradients(rank, step), TERNARY)["layer0.weight"].tolist())

    with pytest.raises(codec.PeerError, match=r"server 1|rank 1 cannot be reached"):
        train()
    assert time.monotonic() - begin < SOON
    return done


@pytest.mark.parametrize("point", range(0, 14, 1 if NIGHTLY else 6))
def test_server_that_dies_is_an_error_for_all_workers(point):
    with RankPool(4, timeout=SOON) as pool:
        pool.new_group()
        pool.start(_server_dies, point)
        found = pool.results([0, 2, 3])
        # The server may die after its reply to one worker and before the other's
        assert abs(len(found[1]) - len(found[2])) <= 1
        assert all(a == b for a, b in zip(found[1], found[2], strict=False))
        assert pool.results([1]) == [KILLED]


def _train_for_ever(client, x):
    for step in itertools.count():
        client.average(step, x, TERNARY)


def _interrupted(rank, size, where):
    options = codec.options(timeout=SOON)
    if rank == 0:
        server = codec.torch.ParameterServer([0], [1, 2], options=options)
        if where == "server":
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                server.serve()
            with pytest.raises(codec.StateError, match="new ParameterServer"):
                server.serve()
            return None
        server.serve()
        return list(server.stats().lost_workers)
    client = codec.torch.ParameterClient([0], options=options)
    x = {"a": torch.ones(4)}
    client.init(x)
    if where == "worker" and rank == 1:
        client.push(0, x)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            client.pull(0, ["a"])
        with pytest.raises(codec.StateError, match="client is closed"):
            client.pull(0, ["a"])
        again = codec.torch.ParameterClient([0], options=options)  # a new client of the same worker joins later steps
        again.init(x)
        dist.send(torch.ones(1), 2)
        found = again.average(5, x, codec.Lossless())["a"].tolist()
        again.close()
        return found
    if where == "worker":
        dist.recv(torch.ones(1), 1)
        found = client.average(5, x, codec.Lossless())["a"].tolist()
        client.close()
        return found
    with pytest.raises(codec.PeerError, match="server 0"):
        _train_for_ever(client, x)
    return None


@pytest.mark.parametrize("where", ["server", "worker"])
def test_ctrl_c_closes_connections_and_serving_goes_on(pools, where):
    found = pools(3).run(_interrupted, where)
    assert found == ([None] * 3 if where == "server" else [[], [1.0] * 4, [1.0] * 4])


def _missing(rank, size):
    """Worker 1 trains although worker 2 never connects: its first step fails, the second one succeeds."""
    options = codec.options(timeout=1)
    if rank == 0:
        server = codec.torch.ParameterServer([0], [1, 2], options=options)
        server.serve()
        return None
    if rank == 2:
        return None
    with codec.torch.ParameterClient([0], options=options) as client:
        x = {"a": torch.ones(4)}
        client.init(x)
        client.push(0, x)
        with pytest.raises(codec.PeerError, match="worker 2"):
            client.pull(0, ["a"])
        time.sleep(0.1)
        return client.average(1, x, TERNARY)["a"].tolist()


def test_worker_that_never_connects_is_left_behind(pools):
    assert pools(3).run(_missing)[1] == [1.0] * 4
