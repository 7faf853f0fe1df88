# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""What the CPU platform decides for models with sparse MLA (DSA)."""

from typing import TYPE_CHECKING

from vllm.config import CompilationMode
from vllm.logger import init_logger
from vllm.v1.attention.backends.registry import AttentionBackendEnum

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger(__name__)

CACHE_DTYPES = ("auto", "float16", "bfloat16")


def uses_sparse_mla(model_config: "ModelConfig | None") -> bool:
    """Whether the model is a DSA model as of DeepSeek-V3.2 and GLM-5.

    DeepSeek-V4 has `index_topk` too, but compresses its cache and has own backends.
    """
    if model_config is None or not model_config.use_mla:
        return False
    config = model_config.hf_text_config
    return hasattr(config, "index_topk") and not hasattr(config, "compress_ratios")


def lift_mla_limits(
    vllm_config: "VllmConfig", reference_mla: bool, full_featured: bool
) -> tuple[bool, bool]:
    """Exempt sparse MLA from the limits of the dense CPU MLA kernel.

    `reference_mla` forces blocks of 16 tokens; without `full_featured` chunked
    prefill and prefix caching are turned off. CPU_MLA_SPARSE needs neither. It does
    need eager execution: a compiled model would read the top-k buffer too early.

    Returns:
        Both flags, changed for sparse MLA models only.

    Raises:
        ValueError: for options that sparse MLA on the CPU does not have.
    """
    if not uses_sparse_mla(vllm_config.model_config):
        return reference_mla, full_featured
    _check_choice(
        vllm_config.attention_config.backend, vllm_config.cache_config.cache_dtype
    )
    _check_parallel(vllm_config)
    compilation = vllm_config.compilation_config
    if compilation.mode != CompilationMode.NONE:
        logger.warning_once(
            "CPU_MLA_SPARSE runs without torch.compile; compilation is turned off."
        )
        compilation.mode = CompilationMode.NONE
    return False, True


def sparse_mla_backend(
    selected: AttentionBackendEnum | None, selector_config: "AttentionSelectorConfig"
) -> str:
    """The class path of CPU_MLA_SPARSE; ValueError if something else was asked for."""
    _check_choice(selected, selector_config.kv_cache_dtype)
    return AttentionBackendEnum["CPU_MLA_SPARSE"].get_path()


def _check_parallel(vllm_config: "VllmConfig") -> None:
    parallel = vllm_config.parallel_config
    for option, size in (
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
    ):
        if size > 1:
            raise ValueError(
                f"{option} {size} is not supported by CPU_MLA_SPARSE, the backend of "
                "sparse MLA models on the CPU. Leave the option out."
            )
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    plain = vllm_config.model_config.quantization is None
    if parallel.enable_expert_parallel and ranks > 1 and plain:
        raise ValueError(
            "--enable-expert-parallel crashes the CPU kernel of the release for "
            "unquantized experts. Leave the option out, or keep the blocks of a "
            "quantized GGUF file with --quantization gguf_native."
        )


def _check_choice(
    backend: AttentionBackendEnum | None, cache_dtype: str | None
) -> None:
    if backend is not None and backend.name != "CPU_MLA_SPARSE":
        raise ValueError(
            f"Attention backend {backend.name} cannot run sparse MLA on the CPU. The "
            "one that can is CPU_MLA_SPARSE: ask for that, or leave "
            "--attention-backend out."
        )
    if cache_dtype is not None and cache_dtype not in CACHE_DTYPES:
        raise ValueError(
            f"--kv-cache-dtype {cache_dtype} is not supported by CPU_MLA_SPARSE, the "
            "backend of sparse MLA models on the CPU. Supported: "
            f"{', '.join(CACHE_DTYPES)} (auto is the dtype of the model)."
        )
