# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""A real `vllm serve` for tests, and what they ask of it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from openai import OpenAI

import demo
from tests.helpers.limits import HANG_SECONDS


@dataclass(frozen=True)
class Server:
    """A running server: `model` is the path that it was given."""

    url: str
    model: Path
    log_file: Path

    @property
    def client(self) -> OpenAI:
        return OpenAI(
            base_url=f"{self.url}/v1",
            api_key="none",
            max_retries=0,
            timeout=HANG_SECONDS,
        )

    @property
    def name(self) -> str:
        """What requests call the model."""
        return self.client.models.list().data[0].id

    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a GET."""
        return self._send(Request(self.url + path))

    def post(self, path: str, body: bytes | dict[str, Any]) -> tuple[int, str]:
        """Status and body of a POST; bytes are sent as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        return self._send(Request(self.url + path, data, headers))

    def lives(self) -> bool:
        """Whether it is healthy and still generates."""
        answer = self.client.completions.create(
            model=self.name, prompt=[1, 2, 3], max_tokens=2, extra_body=IGNORE_EOS
        )
        usage = answer.usage
        generated = usage is not None and usage.completion_tokens == 2
        return self.get("/health")[0] == 200 and generated

    def _send(self, request: Request) -> tuple[int, str]:
        try:
            with urlopen(request, timeout=HANG_SECONDS) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()


IGNORE_EOS = {"ignore_eos": True}


@contextmanager
def running_server(model: Path, *options: str) -> Iterator[Server]:
    """Serve `model` on a free port; the log lies beside it."""
    log = model.parent / "server.log"
    with demo.serve(model, log, *options) as url:
        yield Server(url, model, log)
