"""TRL's AsyncGRPOTrainer sends compressed weight updates to a vLLM server over HTTP. Run by make rollouts."""

import os
import signal

import pytest
from trl.experimental.async_grpo.async_grpo_trainer import WeightTransferProtocol
from trl.experimental.async_grpo.vllm_client import VLLMClient

from codec.integrations.trl import CodecWeightTransfer
from support.trl_training import Rollouts, generated, new_trainer, save_model, start_server, wait_for


@pytest.fixture
def serve(tmp_path):
    """Return a function that starts a vLLM server for a model's folder, and returns its URL."""
    started = []

    def start(folder):
        process, url = start_server(folder, tmp_path / f"{len(started)}.log")
        started.append(process)
        wait_for(url)
        return url

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


def test_trainer_updates_a_server(serve, tmp_path):
    """After three steps, the server generates the same tokens as a server that loads the saved trained model."""
    model = tmp_path / "model"
    save_model(model)
    url = serve(model)
    before = generated(url)
    transfer: WeightTransferProtocol = CodecWeightTransfer(VLLMClient(url), tmp_path / "updates", host="127.0.0.1")
    worker = Rollouts()
    trainer = new_trainer(model, url, tmp_path / "out", worker, weight_transfer=transfer)
    trainer.train()
    assert worker.versions == [1, 2, 3, 4]
    names = sorted(p.name[-9:] for p in (tmp_path / "updates").glob("0*"))
    assert len(names) == 4
    after = generated(url)
    assert after != before
    trainer.model.save_pretrained(tmp_path / "trained")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "trained" / name).write_bytes((model / name).read_bytes())
    assert generated(serve(tmp_path / "trained")) == after
