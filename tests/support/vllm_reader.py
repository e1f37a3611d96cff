"""A program for the environment of vLLM: it reads saved models in float32, one after the other.

python vllm_reader.py FOLDER < {"names": ["qwen3", ...], "ids": [1, 2, 3]}    prints {"qwen3": [log-probabilities], ...}

A value is one log-probability for each id but the first, or the error of reading. Only the dtype is given, and the
sizes of what vLLM reserves. It runs without treepack and without the packages of the tests.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}


def read(folder: Path, ids: list[int]) -> list[float]:
    """Return the log-probability of each id but the first."""
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm = None
    try:
        llm = LLM(str(folder), dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=64)
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        values = output.prompt_logprobs
        return [at[token].logprob for at, token in zip(values[1:], ids[1:], strict=True)]
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    found: dict[str, Any] = {}
    for name in asked["names"]:
        try:
            found[name] = read(Path(sys.argv[1]) / name, asked["ids"])
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:400]
    print("\n" + json.dumps(found))
