# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Serve a GLM-DSA GGUF with `vllm serve`, ask it questions, print the answers.

Without an argument it serves the trained tiny model of this repository, asks it for one
fact of about 75 in a long text, and fails if it gives another answer. It reads 64
tokens at a time of 1,900, so only an indexer that finds the right ones can answer.

    python examples/demo.py [FILE.gguf] [--question "..."]
"""

import argparse
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from openai import OpenAI

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "tests" / "assets" / "tiny-glm-dsa-trained.Q8_0.gguf"
QUESTION = "What is sparse attention?"
START_SECONDS = 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, help="a glm-dsa GGUF file")
    parser.add_argument("--question", help="ask this only, whatever the answer")
    args = parser.parse_args()
    known = args.model is None and args.question is None
    with tempfile.TemporaryDirectory(prefix="vllm-demo-") as scratch:
        log = Path(scratch, "server.log")
        # Asking for tools makes the fork pick GLM's parsers, also that of thoughts.
        with serve(args.model or MODEL, log, "--enable-auto-tool-choice") as url:
            right = ask_known(url) if known else True
            if not known:
                ask(url, args.question or QUESTION)
    if not right:
        sys.exit("error: the model answered wrongly")


def ask_known(url: str) -> bool:
    """Ask questions that have one right answer; whether the model gave it to all."""
    sys.path.append(str(ROOT))
    from tools.tiny_glm_dsa.tasks import HELLO, make_question

    known = {QUESTION: HELLO[QUESTION]}
    for task in ("add", "needle"):
        question = make_question(task, random.Random(0), split="test", tokens=1900)
        known[question.messages[-1]["content"]] = question.answer
    right = True
    for text, answer in known.items():
        if ask(url, text).strip() != answer:
            print(f"expected: {answer}")
            right = False
    return right


def ask(url: str, question: str) -> str:
    """The model's answer to a question, of up to 64 tokens, through the OpenAI API."""
    print(f"question: {shortened(question)}")
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": question}],
        max_tokens=64,
        temperature=0,
    )
    message = answer.choices[0].message
    if message.content is None:
        print(f"thought:  {getattr(message, 'reasoning', None)}")
    text = message.content or ""
    print(f"answer:   {text}")
    return text


def shortened(text: str) -> str:
    """Beginning and end of a long text, and how much is left out between them."""
    if len(text) <= 400:
        return text
    return f"{text[:200]} [... {len(text) - 400} characters ...] {text[-200:]}"


@contextmanager
def serve(model: Path, log: Path, *options: str) -> Iterator[str]:
    """Run `vllm serve` on `model` and give its URL once it answers; then stop it."""
    port = free_port()
    command = [*vllm_command(), "serve", str(model), "--port", str(port), *options]
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


def vllm_command() -> list[str]:
    """The `vllm` beside this Python, or on the path, or else this Python's module."""
    beside = Path(sys.executable).with_name("vllm")
    if beside.exists():
        return [str(beside)]
    if (found := shutil.which("vllm")) is not None:
        return [found]
    if find_spec("vllm") is None:
        sys.exit("no vLLM; install the fork first: pip install .")
    # A release unpacked on PYTHONPATH has no script.
    return [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
