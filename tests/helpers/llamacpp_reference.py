# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""llama.cpp as a reference, through the `xllamacpp` wheel, in a process of its own.

The wheel brings its own threads and OpenMP, which must not meet torch's. Each call
starts one process that loads the model, answers a JSON request and ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

# Only a hang takes longer. This file is run as a script and imports no other of ours.
LOAD_AND_RUN_SECONDS = 600
MORE_THAN_ANY_VOCABULARY = 1 << 20


class LlamaCppError(RuntimeError):
    """llama.cpp could not load or run the file; the message ends with its log."""


class LlamaCpp:
    """One GGUF file (of a split model: its first shard) read by llama.cpp.

    The key cache is float32, flash attention is off, and one sequence runs at a time.
    """

    def __init__(self, path: str | Path, context: int = 1024) -> None:
        self.path = Path(path)
        self.context = context

    def next_logprobs(self, prompts: list[list[int]]) -> np.ndarray:
        """Log-probabilities of the token after each prompt: float64 [prompts, vocab]"""
        return np.array(self._run("next", prompts=prompts), dtype=np.float64)

    def generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Greedy continuation of each prompt by `count` tokens, past any eos."""
        tokens: list[list[int]] = self._run("generate", prompts=prompts, count=count)
        return tokens

    def tokenize(self, texts: list[str], *, special: bool = True) -> list[list[int]]:
        """Token ids of each text; `special` parses the names of special tokens."""
        ids: list[list[int]] = self._run("tokenize", texts=texts, special=special)
        return ids

    def _run(self, action: str, **arguments: Any) -> Any:
        request = {
            "action": action,
            "model": str(self.path),
            "context": self.context,
            **arguments,
        }
        done = subprocess.run(
            [sys.executable, __file__],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=LOAD_AND_RUN_SECONDS,
            check=False,
        )
        answer = done.stdout.rpartition("\n@")[2]
        if done.returncode or not answer:
            raise LlamaCppError(
                f"llama.cpp ended with status {done.returncode} on {self.path}:\n"
                + done.stderr[-2000:]
            )
        return json.loads(answer)


def _main() -> None:
    """Child process: one request from stdin, "\\n@" and the answer to stdout."""
    request = json.load(sys.stdin)
    server = _Server(request.pop("model"), request.pop("context"))
    answer = getattr(server, request.pop("action"))(**request)
    sys.stdout.write("\n@" + json.dumps(answer))


class _Server:
    def __init__(self, model: str, context: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_ctx = context
        params.n_parallel = 1
        params.warmup = False
        params.n_gpu_layers = 0
        params.cpuparams.n_threads = 1
        params.cpuparams_batch.n_threads = 1
        params.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
        params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        disabled = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.flash_attn_type = disabled
        params.port = 0
        self.server = xllamacpp.Server(params)
        self.letter = self.tokenize(["a"], special=False)[0][0]

    def _post(self, route: str, body: dict[str, Any]) -> Any:
        from urllib.request import Request, urlopen

        request = Request(
            self.server.listening_address + route,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urlopen(request) as response:
            return json.load(response)

    def _probabilities(self, prompt: list[int], count: int) -> list[dict[str, Any]]:
        """The `count` likeliest next tokens, best first, with "id" and "logprob"."""
        body = {
            "prompt": prompt,
            "n_predict": 1,
            # Sampled is always "a", for a token that ends within a UTF-8 character
            # comes without probabilities. Those reported are from before the bias.
            "logit_bias": [[self.letter, 1e9]],
            "n_probs": count,
            "temperature": 0,
            # A prompt that continues the one before it costs its new tokens only.
            "cache_prompt": True,
        }
        answer = self._post("/completion", body)
        best: list[dict[str, Any]] = answer["completion_probabilities"][0][
            "top_logprobs"
        ]
        return best

    def next(self, prompts: list[list[int]]) -> list[list[float]]:
        rows = []
        for prompt in prompts:
            entries = self._probabilities(prompt, MORE_THAN_ANY_VOCABULARY)
            by_id = {entry["id"]: entry["logprob"] for entry in entries}
            rows.append([by_id[token] for token in range(len(by_id))])
        return rows

    def generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        # One request per token: a request for more would end at the first eos.
        sequences = []
        for prompt in prompts:
            tokens: list[int] = []
            for _ in range(count):
                best = self._probabilities(prompt + tokens, 1)[0]
                tokens.append(best["id"])
            sequences.append(tokens)
        return sequences

    def tokenize(self, texts: list[str], special: bool) -> list[list[int]]:
        body = {"add_special": False, "parse_special": special}
        return [
            self._post("/tokenize", {"content": text, **body})["tokens"]
            for text in texts
        ]


if __name__ == "__main__":
    _main()
