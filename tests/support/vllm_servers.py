"""Real vLLM servers of a tiny model on the CPU, from the environment that `make test-vllm` builds.

    exact      float32, --enable-scale-out, --logprobs-mode processed_logprobs      /inference/v1/generate
    default    bfloat16                                                             /v1/completions, raw values

Importing vLLM takes most of a start, in three processes one after the other. So the two servers start at the same time.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from support.paths import ROOT

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
SECONDS_TO_START = 900.0
MAX_LEN = 1024


@dataclass(frozen=True)
class VllmServer:
    url: str
    process: subprocess.Popen[bytes]
    log: Path


@dataclass(frozen=True)
class VllmServers:
    """The model's folder, and the two servers."""

    model: Path
    exact: VllmServer
    default: VllmServer


def save_model(folder: Path) -> Path:
    """Save a tiny Qwen3 with random weights that are equal in float32 and bfloat16.

    Its logits are below 2; bfloat16 would round larger ones by up to 0.01. With heads of 80, vLLM runs the same
    attention on every CPU; with a multiple of 32 it takes a kernel for AMX, which crashes on some machines.
    """
    config = AutoConfig.from_pretrained(ROOT / "sample_data" / "tiny-qwen3.json", head_dim=80)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).bfloat16().float()
    model.save_pretrained(folder)
    for file in (ROOT / "sample_data" / "tokenizer").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@contextmanager
def running_servers(folder: Path) -> Iterator[VllmServers]:
    """Start both servers, wait until they answer, and end them with all their processes."""
    model = save_model(folder / "model")
    exact = ["--dtype", "float32", "--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    with ExitStack() as stack:
        servers = [
            stack.enter_context(_started(folder / f"{name}.log", ["--model", str(model), *options]))
            for name, options in (("exact", exact), ("default", ["--dtype", "bfloat16"]))
        ]
        for server in servers:
            _wait(server)
        yield VllmServers(model, *servers)


@contextmanager
def _started(log: Path, options: list[str]) -> Iterator[VllmServer]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", "tiny", "--max-model-len", str(MAX_LEN), "--enforce-eager", *options]
    # A prefill in two parts takes back a random number, which torch's generator of the CPU cannot do: the engine dies.
    command += ["--enable-prompt-tokens-details", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192"]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    environment.pop("TRITON_INTERPRET", None)
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        yield VllmServer(f"http://127.0.0.1:{port}", process, log)
    finally:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a server at once, with its engine and its worker."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait(server: VllmServer) -> None:
    end = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            assert server.process.poll() is None, server.log.read_text()[-3000:]
            time.sleep(0.5)
    raise AssertionError(server.log.read_text()[-3000:])
