"""LoRA adapters: published versions are loaded by an engine, or its old version stays."""

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import codec
from codec.integrations.peft import AdapterPublisher, AdapterReceiver, LoraServer
from codec.weight_sync import Publisher
from support.adapters import Engine, adapter, equal, stepped


@pytest.fixture
def publisher(tmp_path):
    with AdapterPublisher(tmp_path / "store") as opened:
        yield opened


def receiver(tmp_path, engine=None, **how):
    return AdapterReceiver(tmp_path / "adapters", engine, **how)


def on_disk(tmp_path):
    """Return the number of versions in the receiver's folder, and the names of all other files."""
    names = os.listdir(tmp_path / "adapters")
    return len([n for n in names if not n.startswith(".")]), [n for n in names if n.startswith(".")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_folder_of_the_receiver_equals_the_one_that_was_published(publisher, tmp_path, dtype):
    config, tensors = adapter(1)
    given = tmp_path / "given"
    given.mkdir()
    save_file(
        {n: torch.from_numpy(x).to(dtype) for n, x in tensors.items()},
        given / "adapter_model.safetensors",
        {"format": "pt"},
    )
    (given / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    publisher.publish({"policy": given})
    with receiver(tmp_path) as received:
        assert received.pull(publisher.source) == 0
    assert list(received.paths) == ["policy-v0"]
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (given / name).read_bytes() == Path(received.paths["policy-v0"], name).read_bytes()


def test_engine_serves_each_version_under_a_new_name(publisher, tmp_path):
    engine, versions = Engine(), [adapter(1)]
    received = receiver(tmp_path, engine, keep=1)
    for k in range(4):
        assert publisher.publish({"policy": versions[-1]}) == k
        assert received.pull(publisher.source) == received.version == k
        assert received.pull(publisher.source) == k
        versions.append(stepped(versions[-1], k))
    assert engine.serves(policy_v2=versions[2], policy_v3=versions[3])
    assert on_disk(tmp_path) == (2, [])
    assert [call for call in engine.calls if call[0] == "load"] == [("load", f"policy-v{k}") for k in range(4)]


def test_step_is_an_update_of_the_changed_tensors(publisher, tmp_path):
    first = adapter(1)
    second = stepped(first)
    name = next(iter(second[1]))
    third = second[0], second[1] | {name: second[1][name] + 1}
    sizes = []
    for given in (first, second, third):
        update = publisher.stage({"policy": given})
        sizes.append(update.nbytes)
        publisher.commit()
    assert sizes[1] < 0.7 * sizes[0]
    assert list(update.tensors) == [f"policy/{name}"]


def test_adapter_that_begins_anew_is_a_snapshot_because_it_is_smaller_than_a_delta(publisher):
    old, new = adapter(1, rank=32), adapter(2, rank=32, zeros=True)
    publisher.publish({"policy": old})
    delta = codec.WeightSender(old[1]).diff(new[1])
    update = publisher.stage({"policy": new})
    assert update.base is None
    assert update.nbytes < 0.9 * delta.nbytes
    assert publisher.commit() == 1
    assert publisher.stage({"policy": stepped(new)}).base == 1
    names = sorted(p.name.lstrip("0") for p in Path(publisher.source).iterdir())
    assert names == [".snapshot", "1.snapshot", "2.update", "head"]


def test_adapters_ranks_and_removals(publisher, tmp_path):
    engine = Engine()
    received = receiver(tmp_path, engine, keep=0)
    both = {"policy": adapter(1), "critic": adapter(2, rank=8)}
    publisher.publish(both)
    received.pull(publisher.source)
    assert engine.serves(policy_v0=both["policy"], critic_v0=both["critic"])
    wider = {"policy": adapter(1, rank=16), "critic": both["critic"]}
    publisher.publish(wider)
    received.pull(publisher.source)
    assert engine.serves(policy_v1=wider["policy"], critic_v1=wider["critic"])
    publisher.publish({"policy": wider["policy"]})
    received.pull(publisher.source)
    assert engine.serves(policy_v2=wider["policy"])
    publisher.publish({})
    assert received.pull(publisher.source) == 3
    assert engine.serves()
    assert received.paths == {}


@pytest.mark.parametrize("fail", [{3, 4}, {4, 5}])
def test_engine_keeps_the_old_version_if_a_load_fails(publisher, tmp_path, fail):
    """The first or the second adapter of version 1 fails; a failed load is tried once more."""
    engine = Engine(fail)
    received = receiver(tmp_path, engine)
    old = {"policy": adapter(1), "critic": adapter(2)}
    publisher.publish(old)
    received.pull(publisher.source)
    new = {name: stepped(given) for name, given in old.items()}
    publisher.publish(new)
    with pytest.raises(RuntimeError, match="out of memory"):
        received.pull(publisher.source)
    assert received.version == 0
    assert sorted(received.paths) == ["critic-v0", "policy-v0"]
    assert engine.serves(policy_v0=old["policy"], critic_v0=old["critic"])
    assert on_disk(tmp_path) == (1, [])
    assert received.pull(publisher.source) == 1
    assert equal(engine.served["policy-v1"], new["policy"])
    assert equal(engine.served["critic-v1"], new["critic"])


def test_interrupted_load_leaves_the_old_version(publisher, tmp_path, monkeypatch):
    engine = Engine()
    received = receiver(tmp_path, engine)
    publisher.publish({"policy": adapter(1)})
    received.pull(publisher.source)
    publisher.publish({"policy": adapter(2)})

    def interrupt(lora_name, lora_path):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "load_lora_adapter", interrupt)
    with pytest.raises(KeyboardInterrupt):
        received.pull(publisher.source)
    assert received.version == 0
    monkeypatch.undo()
    assert engine.serves(policy_v0=adapter(1))
    assert received.pull(publisher.source) == 1


def test_full_disk_leaves_the_old_version(publisher, tmp_path, monkeypatch):
    engine = Engine()
    received = receiver(tmp_path, engine)
    publisher.publish({"policy": adapter(1)})
    received.pull(publisher.source)
    publisher.publish({"policy": adapter(2)})

    def full(fd):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(codec.StateError, match="No space left"):
            received.pull(publisher.source)
    assert received.version == 0
    assert on_disk(tmp_path) == (1, [])
    assert received.pull(publisher.source) == 1
    assert equal(engine.served["policy-v1"], adapter(2))


@pytest.mark.parametrize("damage", ["missing", "shorter", "changed", "longer", "another adapter"])
def test_damaged_files_are_written_again(publisher, tmp_path, damage):
    """Such as after a failure of the machine: the folder's name alone says nothing."""
    publisher.publish({"policy": adapter(1)})
    received = receiver(tmp_path)
    received.pull(publisher.source)
    file = Path(received.paths["policy-v0"], "adapter_model.safetensors")
    right = data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "another adapter":
        (file.parents[1] / "other").mkdir()
    else:
        file.write_bytes({"shorter": data[:-1], "changed": data[:-1] + b"x", "longer": data + b"x"}[damage])
    assert receiver(tmp_path, engine := Engine()).pull(publisher.source) == 0
    assert engine.serves(policy_v0=adapter(1))
    assert file.read_bytes() == right
    assert on_disk(tmp_path) == (1, [])


def test_files_of_others_in_the_folder_of_a_version_are_an_error(publisher, tmp_path):
    publisher.publish({"policy": adapter(1)})
    received = receiver(tmp_path)
    received.pull(publisher.source)
    file = Path(received.paths["policy-v0"], "adapter_model.safetensors")
    file.write_bytes(b"")
    (file.parent / "mine").write_bytes(b"1")
    with pytest.raises(codec.StateError, match="cannot be written"):
        receiver(tmp_path).pull(publisher.source)
    assert (file.parent / "mine").exists()
    assert on_disk(tmp_path) == (1, [])


def test_folders_of_killed_processes_are_deleted_once_they_are_old(publisher, tmp_path):
    publisher.publish({"policy": adapter(1)})
    received = receiver(tmp_path)
    left = [tmp_path / "adapters" / f".{0:020d}-{'a' * 32}.{k}.tmp" for k in range(2)]
    for path in left:
        (path / "policy").mkdir(parents=True)
        (path / "policy/adapter_config.json").write_bytes(b"{}")
    os.utime(left[0], (0, 0))
    other = tmp_path / "adapters/.other.tmp"
    other.mkdir()
    os.utime(other, (0, 0))
    received.pull(publisher.source)
    assert sorted(on_disk(tmp_path)[1]) == sorted([left[1].name, other.name])


def test_receiver_that_starts_again_loads_names_that_the_engine_knows(publisher, tmp_path):
    engine = Engine()
    publisher.publish({"policy": adapter(1)})
    receiver(tmp_path, engine).pull(publisher.source)
    again = receiver(tmp_path, engine)
    assert again.version is None
    assert again.pull(publisher.source) == 0
    assert engine.serves(policy_v0=adapter(1))
    engine.served.clear()  # the engine was restarted
    again.reload()
    assert engine.serves(policy_v0=adapter(1))


@pytest.mark.parametrize("fails", [False, True])
def test_new_run_with_the_version_of_the_old_one(tmp_path, fails):
    """An emptied store begins again at version 0, whose names the engine has."""
    engine = Engine()
    received = receiver(tmp_path, engine)
    for seed in (1, 2):
        with AdapterPublisher(tmp_path / f"store-{seed}") as publisher:
            publisher.publish({"policy": adapter(seed)})
            if seed == 2 and fails:
                engine.fail = {2, 3}
                with pytest.raises(RuntimeError):
                    received.pull(publisher.source)
                assert received.version == 0
                assert engine.serves(policy_v0=adapter(1))
            assert received.pull(publisher.source) == 0
            assert engine.serves(policy_v0=adapter(seed))


def test_engine_that_returns_errors_as_sglang_does(publisher, tmp_path):
    engine = SimpleNamespace(
        load_lora_adapter=lambda lora_name, lora_path: SimpleNamespace(success=False, error_message="rank too high"),
        unload_lora_adapter=lambda lora_name: SimpleNamespace(success=True),
    )
    publisher.publish({"policy": adapter(1)})
    received = receiver(tmp_path, engine)
    with pytest.raises(codec.StateError, match="rejected the adapter: rank too high"):
        received.pull(publisher.source)
    assert (received.version, received.paths) == (None, {})


def test_signed_updates_over_http(tmp_path):
    key = os.urandom(32)
    with AdapterPublisher(tmp_path / "store", host="127.0.0.1", sign=key, token="t" * 32) as publisher:
        publisher.publish({"policy": adapter(1)})
        assert receiver(tmp_path, verify=key).pull(publisher.source, token="t" * 32) == 0
        with pytest.raises(codec.FrameError, match="sign"):
            receiver(tmp_path, verify=os.urandom(32)).pull(publisher.source, token="t" * 32)


def test_update_over_another_connection(tmp_path):
    config, tensors = adapter(1)
    with AdapterPublisher(tmp_path / "store") as publisher:
        data = bytes(publisher.stage({"policy": (config, tensors)}).data)
    engine = Engine(fail={1, 2})
    received = receiver(tmp_path, engine)
    with pytest.raises(RuntimeError):
        received.apply(data)
    assert received.version is None
    assert received.apply(data) == 0
    assert engine.serves(policy_v0=adapter(1))
    with pytest.raises(codec.StateError, match="applied already"):
        received.apply(data)


def test_store_of_other_weights_is_an_error(tmp_path):
    with Publisher(tmp_path / "store") as publisher:
        publisher.publish({"w": np.ones(3, np.float32)})
        with pytest.raises(codec.FrameError, match="'w' is not a tensor of an adapter"):
            receiver(tmp_path).pull(publisher.source)
    assert on_disk(tmp_path) == (0, [])


class Server(HTTPServer):
    """Server with the two calls of vLLM, whose adapters are those of an Engine."""

    def __init__(self):
        self.engine, self.keys = Engine(), []
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.keys.append(self.headers["Authorization"])
        status, text = 404, "Not Found"
        if self.path.startswith("/v1/"):
            try:
                getattr(self.server.engine, self.path.rpartition("/")[2])(**body)
                status, text = 200, "Success"
            except Exception as e:
                status, text = 500, str(e)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with Server() as opened:
        threading.Thread(target=opened.serve_forever, daemon=True).start()
        yield opened
        opened.shutdown()


def test_server_loads_and_unloads_adapters(publisher, tmp_path, server):
    url = f"http://127.0.0.1:{server.server_port}"
    received = receiver(tmp_path, LoraServer(f"{url}/v1/", api_key="secret"), keep=0)
    for k in range(2):
        publisher.publish({"policy": adapter(k)})
        assert received.pull(publisher.source) == k
    assert server.engine.serves(policy_v1=adapter(1))
    assert set(server.keys) == {"Bearer secret"}


def test_server_that_cannot_load_is_an_error(publisher, tmp_path, server):
    url = f"http://127.0.0.1:{server.server_port}"
    server.engine.fail = set(range(9))
    publisher.publish({"policy": adapter(1)})
    for address, message in ((f"{url}/v1", "answered 500: out of memory"), (url, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")):
        with pytest.raises(codec.StateError, match=message):
            receiver(tmp_path, LoraServer(address)).pull(publisher.source)
    server.shutdown()
    server.server_close()
    with pytest.raises(codec.StateError, match="cannot be reached"):
        receiver(tmp_path, LoraServer(url)).pull(publisher.source)
    with pytest.raises(codec.ArgumentError, match="one of http or https"):
        LoraServer("127.0.0.1:8000")
