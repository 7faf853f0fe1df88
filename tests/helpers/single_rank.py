# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""vLLM's distributed state for tests that make layers without an engine."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state


@contextmanager
def single_rank() -> Iterator[VllmConfig]:
    """One gloo rank without parallelism, and a default config as the current one."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        with rank_of(0, 1, store) as config:
            yield config


@contextmanager
def rank_of(
    rank: int, world_size: int, store: str, *, expert_parallel: bool = False
) -> Iterator[VllmConfig]:
    """Rank `rank` of a gloo group of `world_size` with tensor parallelism.

    `store` is a file:// URL that all ranks share.
    """
    config = VllmConfig(
        parallel_config=ParallelConfig(
            tensor_parallel_size=world_size, enable_expert_parallel=expert_parallel
        )
    )
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            world_size, rank, store, local_rank=rank, backend="gloo"
        )
        parallel_state.ensure_model_parallel_initialized(world_size, 1)
        try:
            yield config
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
