# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Serve a GLM-DSA GGUF with `vllm serve`, ask it one question, print the answer.

Without an argument it writes a tiny model with random weights: the answer shows that
file, tokenizer, template, model and server work together, and means nothing.

    python examples/demo.py [FILE.gguf] [--question "..."]
"""

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from openai import OpenAI

from tiny_glm_dsa import TinySpec, write_tiny_glm_dsa

START_SECONDS = 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, help="a glm-dsa GGUF file")
    parser.add_argument("--question", default="What is sparse attention?")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vllm-demo-") as scratch:
        model = args.model
        if model is None:
            model = Path(scratch, "tiny-glm-dsa.gguf")
            write_tiny_glm_dsa(model, TinySpec(weight_type="Q8_0"))
            print(f"wrote {model}: a tiny model with random weights")
        with serve(model, Path(scratch, "server.log")) as url:
            print(f"question: {args.question}")
            print(f"answer:   {ask(url, args.question)!r}")


def ask(url: str, question: str) -> str:
    """The model's answer, of up to 32 tokens, through the OpenAI API."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": question}],
        max_tokens=32,
        temperature=0,
    )
    return answer.choices[0].message.content or ""


@contextmanager
def serve(model: Path, log: Path, *options: str) -> Iterator[str]:
    """Run `vllm serve` on `model` and give its URL once it answers; then stop it."""
    port = free_port()
    command = [vllm_command(), "serve", str(model), "--port", str(port), *options]
    print("$", *command)
    # Without a limit the CPU platform takes nearly all memory for its cache.
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", **os.environ}
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(f"{url}/health", server, log)
            yield url
        finally:
            server.terminate()
            server.wait(timeout=60)
    print("server stopped")


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Return when `url` answers; exit with the server's log if it does not."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urlopen(url, timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.5)
    text = log.read_text(encoding="utf-8", errors="replace")
    sys.exit(f"the server did not start; its log ends with:\n{text[-4000:]}")


def vllm_command() -> str:
    """The `vllm` beside this Python, or else the one on the path."""
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.exists() else shutil.which("vllm")
    if found is None:
        sys.exit("no `vllm` command; install the fork first: pip install .")
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
