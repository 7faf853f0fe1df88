# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""vLLM's engine in the test's own process.

It needs VLLM_ENABLE_V1_MULTIPROCESSING=0, which `tests/e2e/conftest.py` sets.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm import LLM


@contextmanager
def engine(model: Path, **options: Any) -> Iterator[LLM]:
    """In float32 unless told otherwise; prompts are cut into chunks of 128 tokens."""
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_batched_tokens": 128,
        "kv_cache_memory_bytes": 64 << 20,
    }
    with quick_collections():
        llm = LLM(str(model), **{**defaults, **options})
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()


@contextmanager
def quick_collections() -> Iterator[None]:
    """What exists now, modules above all, is not searched for garbage any more.

    An engine has all garbage collected eight times, which would take most of its time.
    """
    gc.collect()
    gc.freeze()
    with patch.object(gc, "freeze"), patch.object(gc, "unfreeze"):
        yield
