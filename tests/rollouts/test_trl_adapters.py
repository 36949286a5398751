"""TRL trains a LoRA adapter for a vLLM server on another network, with other disks. Run by make rollouts."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import requests
from peft import LoraConfig
from safetensors.torch import load_file
from trl.experimental.async_grpo.vllm_client import VLLMClient

from codec.errors import StateError
from codec.integrations.peft import AdapterPublisher, AdapterReceiver, LoraServer
from codec.integrations.trl import CodecAdapterClient
from support.trl_training import Rollouts, generated, new_trainer, save_model, start_server, wait_for

sys.path.insert(0, str(Path(__file__).parents[2] / "bench/network"))
import netns

LORA = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
OPTIONS = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "4", "--max-cpu-loras", "4")


@pytest.fixture
def network():
    """Return two network namespaces joined by a bridge."""
    if os.geteuid():
        pytest.skip("network namespaces need root")
    with netns.Network(2) as made:
        yield made


def test_adapters_reach_a_server_without_a_shared_disk(network, tmp_path):
    """The server sees neither the trainer's folder nor the other way around; it serves the trained adapter."""
    for name in ("model", "trainer", "server", "both"):
        (tmp_path / name).mkdir()
    save_model(tmp_path / "model")
    hidden = f'mount -t tmpfs none {tmp_path}/trainer && mount -t tmpfs none {tmp_path}/server && exec "$@"'
    prefix = ("ip", "netns", "exec", network.names[1], "unshare", "--mount", "sh", "-c", hidden, "sh")
    log = tmp_path / "server.log"
    server, url = start_server(tmp_path / "model", log, *OPTIONS, host="10.77.0.2", prefix=prefix, **LORA)
    try:
        command = ("ip", "netns", "exec", network.names[0], sys.executable, "-P", __file__, url, str(tmp_path))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # tests/support is not installed
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=900, env=environment)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(60)
    assert done.returncode == 0, done.stderr[-3000:] + log.read_text()[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["versions"] == [1, 2, 3, 4]
    assert found["served"] == found["reference"] != found["base"]
    assert found["first"] != found["served"]
    assert found["names"] == ["trl-policy-v2", "trl-policy-v3", "trl-policy-v4"]
    assert found["failed"] == found["received"] == found["served"]
    assert os.listdir(tmp_path / "server") == []


def train(url, root):
    """Train in the first namespace, and print what the server generates."""
    wait_for(url)
    rollouts = Rollouts()
    trainer = new_trainer(
        root / "model",
        url,
        root / "trainer/out",
        rollouts,
        max_staleness=2,
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM"),
    )
    client = trainer.vllm_client = CodecAdapterClient(
        trainer.vllm_client, root / "trainer/updates", str(root / "server/adapters"), host="10.77.0.1"
    )
    found, resume = {}, client.resume

    def note_first():
        resume()
        found.setdefault("first", generated(url, "trl-policy-v1"))

    client.resume = note_first
    trainer.train()
    trainer.model.save_pretrained(root / "both", save_embedding_layers=False)
    plain = VLLMClient(url)
    plain.load_lora_adapter("reference", str(root / "both"))
    found["versions"] = rollouts.versions
    found["base"] = generated(url, str(root / "model"))
    found["served"], found["reference"] = generated(url, "trl-policy-v4"), generated(url, "reference")
    plain.unload_lora_adapter("reference")
    found["received"] = received(url, root)
    found["names"] = sorted(name for name in names_of(url) if name.startswith("trl"))
    # an adapter that vLLM rejects: the server serves what it has
    config = json.loads((root / "both/adapter_config.json").read_text())
    (root / "both/adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    try:
        client.load_lora_adapter("trl-policy-v5", str(root / "both"))
    except Exception as e:
        print(e)
        found["failed"] = generated(url, "trl-policy-v4")
    print(json.dumps(found))


def received(url, root):
    """Return what the server generates with the saved adapter, which a receiver beside the server has loaded twice."""
    config = json.loads((root / "both/adapter_config.json").read_text())
    tensors = load_file(root / "both/adapter_model.safetensors")
    with AdapterPublisher(root / "trainer/other") as publisher:
        publisher.publish({"other": root / "both"})
        for _ in range(2):  # the second receiver finds a name that the server knows
            receiver = AdapterReceiver(root / "versions", LoraServer(f"{url}/v1"))
            assert receiver.pull(publisher.source) == 0
        publisher.publish({"other": (config | {"use_dora": True}, tensors)})
        try:
            receiver.pull(publisher.source)
        except StateError as e:
            print(e)
            assert receiver.version == 0
            assert "other-v1" not in names_of(url)
            return generated(url, "other-v0")
        raise AssertionError("vLLM has loaded an adapter of DoRA")


def names_of(url):
    return [model["id"] for model in requests.get(f"{url}/v1/models", timeout=60).json()["data"]]


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]))
