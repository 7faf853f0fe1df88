# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Time and memory to read a GLM-5.3 GGUF header, beside gguf-py's GGUFReader.

    python -m benchmarks.gguf_header [--runs N] [--json FILE]

The header has the size of a real one (154,880 tokens, 321,649 merges) and made-up
tokens. Each run is a fresh process; times are medians of wall-clock seconds, memory
is the peak growth of the resident set after the imports.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

from tests.helpers.glm_header import write_glm_shards
from tests.helpers.light_process import run_light

_MEASURE = """
import time
{imports}
before = status("VmRSS")
reset_peak()
start = time.perf_counter()
{work}
print(time.perf_counter() - start, status("VmHWM") - before)
"""
_OURS = "from vllm.transformers_utils.gguf.reader import open_gguf"
_LISTS = """
for key in ("tokens", "merges", "token_type"):
    keep = globals().setdefault("kept", [])
    keep.append({get})
"""

# name -> (imports, work, most runs)
CASES: dict[str, tuple[str, str, int]] = {
    "fork: open": (_OURS, "file = open_gguf(sys.argv[2])", 100),
    "fork: open, decode tokens": (
        _OURS,
        "file = open_gguf(sys.argv[2])"
        + _LISTS.format(get='file.array("tokenizer.ggml." + key)'),
        100,
    ),
    "gguf-py: open": (
        "from gguf import GGUFReader",
        "file = GGUFReader(sys.argv[2])",
        3,
    ),
    "gguf-py: open, decode tokens": (
        "from gguf import GGUFReader",
        "file = GGUFReader(sys.argv[2])"
        + _LISTS.format(get='file.fields["tokenizer.ggml." + key].contents()'),
        3,
    ),
}


def measure(path: Path, case: str, runs: int) -> dict[str, Any]:
    """Median and spread of `runs` fresh processes."""
    imports, work, most = CASES[case]
    code = _MEASURE.format(imports=imports, work=work)
    samples = [
        [float(word) for word in run_light(code, str(path), timeout=900).split()]
        for _ in range(min(runs, most))
    ]
    seconds = [sample[0] for sample in samples]
    return {
        "case": case,
        "runs": len(samples),
        "seconds_median": statistics.median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "peak_mib_median": statistics.median(sample[1] for sample in samples),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = write_glm_shards(Path(directory))[0]
        results = [measure(path, case, arguments.runs) for case in CASES]
    print(f"{'':30}{'seconds':>9}{'min':>8}{'max':>8}{'peak MiB':>10}{'runs':>6}")
    for row in results:
        print(
            f"{row['case']:30}{row['seconds_median']:9.3f}{row['seconds_min']:8.3f}"
            f"{row['seconds_max']:8.3f}{row['peak_mib_median']:10.1f}{row['runs']:6}"
        )
    if arguments.json:
        machine = {
            "python": platform.python_version(),
            "gguf": importlib.metadata.version("gguf"),
            "processor": platform.machine(),
            "cpus": os.cpu_count(),
        }
        report = {"machine": machine, "results": results}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
