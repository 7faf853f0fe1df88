# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Blocks made by ggml's own quantizers, for tests that run torch.

llama.cpp's library brings an OpenMP runtime of its own, so it is loaded in another
process.
"""

from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context, util

import numpy as np

from examples import ggml_quantize

FLOAT_TYPES = ("F32", "F16", "BF16")
# gguf-py 0.19 cannot dequantize Q1_0, so there is nothing to compare it with.
ALL_TYPES = tuple(name for name in ggml_quantize.TYPES if name != "Q1_0")


@cache
def random_blocks(type_name: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Real blocks of `type_name`: normal weights of scale 0.05, quantized by ggml.

    The result, uint8 [rows, row bytes], is read-only: callers share it.
    """
    values = np.random.default_rng(seed).standard_normal((rows, columns)) * 0.05
    job = _pool().submit(ggml_quantize.quantize, type_name, values.astype(np.float32))
    data = job.result()
    data.flags.writeable = False
    return data


@cache
def _pool() -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn"))
    # A process of another pool waits for its children before it ends its own pools, so
    # this one ends earlier: before its queues are closed too, at priority 10.
    util.Finalize(pool, pool.shutdown, exitpriority=100)
    return pool
