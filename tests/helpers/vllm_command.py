# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""`vllm` commands that end by themselves: status, output and CPU time."""

import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import demo
from tests.helpers.limits import HANG_SECONDS

# To take a process with all of vLLM apart costs a second, which the children skip.
_FORKS = """
import json, os, sys
from vllm.entrypoints.cli.main import main

ends = []
for number, arguments in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if not child:
        for stream in (sys.stdout, sys.stderr):
            file = f"{number}.{stream.fileno()}"
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream.fileno())
        sys.argv = ["vllm", *arguments]
        try:
            sys.exit(main())
        except SystemExit as end:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(end.code)
    _, status, usage = os.wait4(child, 0)
    ends.append((os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime))
print(json.dumps(ends))
"""


@dataclass(frozen=True)
class Run:
    """How one command ended; `cpu` are its seconds of CPU time."""

    status: int
    stdout: str
    stderr: str
    cpu: float


def run_vllm(*arguments: str) -> Run:
    """Run `vllm` with these arguments."""
    before = _children_cpu()
    done = subprocess.run(
        [*demo.vllm_command(), *arguments],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    cpu = _children_cpu() - before
    return Run(done.returncode, done.stdout, done.stderr, cpu)


def fork_vllm(folder: Path, commands: Sequence[Sequence[str]]) -> list[Run]:
    """Run `vllm` with each of several lists of arguments, one after the other.

    vLLM, which takes seconds, is imported once: all are forks of one process. Their
    output goes through files in `folder`.
    """
    done = subprocess.run(
        [sys.executable, "-c", _FORKS, json.dumps(commands)],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        timeout=HANG_SECONDS,
        check=True,
    )
    ends = json.loads(done.stdout.splitlines()[-1])
    return [
        Run(status, *((folder / f"{number}.{fd}").read_text() for fd in (1, 2)), cpu)
        for number, (status, cpu) in enumerate(ends)
    ]


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
