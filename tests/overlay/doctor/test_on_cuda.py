# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The doctor's answers about GPUs, beside the CUDA release itself."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.cuda_tree import device, in_cuda_tree
from tests.overlay.doctor.glm5 import write_glm5
from vllm.transformers_utils.gguf.doctor import engine, memory
from vllm.transformers_utils.gguf.doctor.machine import GIB, Machine
from vllm.transformers_utils.gguf.doctor.split import Split
from vllm.transformers_utils.gguf.glm_dsa import GlmDsaConfig, read_config
from vllm.transformers_utils.gguf.reader import open_gguf

ALONE = Split(8, 1, False, (78,))
CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> GlmDsaConfig:
    with open_gguf(write_glm5(tmp_path_factory.mktemp("glm5"))) as file:
        return read_config(file)


def gpus(capability: tuple[int, int] | None, size: int = 96) -> Machine:
    return Machine("cuda", 8, size * GIB, capability, "GPU", False)


def attention(
    config: GlmDsaConfig, capability: tuple[int, int], option: str
) -> engine.Attention:
    machine = gpus(capability)
    with engine.device_of(machine):
        return engine.cuda_attention(config, machine, ALONE, "bfloat16", option)


@in_cuda_tree
def check_same_choice(config: GlmDsaConfig, capability: tuple[int, int]) -> None:
    import torch

    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    for option in ("auto", "bfloat16", "fp8", "fp8_ds_mla"):
        found = attention(config, capability, option)
        if capability[0] == 10:
            # CUTLASS_MLA takes a device to be imported.
            assert found.rejected["CUTLASS_MLA"]
            continue
        view = engine._view(config, ALONE, "bfloat16", option)
        selector = AttentionSelectorConfig(
            576, torch.bfloat16, option, None, use_mla=True, use_sparse=True
        )
        with device(capability), set_current_vllm_config(view):
            path = current_platform.get_attn_backend_cls(None, selector, 8)
        module, _, name = path.rpartition(".")
        backend = getattr(sys.modules[module], name).get_name()
        assert found.backend == backend, (option, found)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_the_server_would_choose_the_same_backend(
    config: GlmDsaConfig, capability: tuple[int, int]
) -> None:
    check_same_choice(config, capability)


@in_cuda_tree
def check_reasons(config: GlmDsaConfig) -> None:
    ampere = attention(config, (8, 6), "auto")
    assert ampere.backend == "TRITON_MLA_SPARSE"
    assert ampere.cache == "auto"
    assert ampere.rejected["FLASHMLA_SPARSE"] == ("compute capability not supported",)
    assert "sparse not supported" in ampere.rejected["TRITON_MLA"]
    turing = attention(config, (7, 5), "auto")
    assert turing.backend is None
    assert turing.cache is None
    assert "compute capability" in str(turing.rejected["TRITON_MLA_SPARSE"])
    # The release's default for this model there.
    assert attention(config, (10, 0), "auto").cache == "fp8_e4m3"


def test_rejected_backends_have_a_reason(config: GlmDsaConfig) -> None:
    check_reasons(config)


@in_cuda_tree
def check_indexer() -> None:
    found = {}
    for capability in CAPABILITIES:
        machine = gpus(capability)
        with engine.device_of(machine):
            found[capability] = engine.cuda_indexer(machine).path
    assert found == {
        capability: "Triton" if capability[0] == 8 else "DeepGEMM"
        for capability in CAPABILITIES
    }


def test_the_indexer_depends_on_the_device() -> None:
    check_indexer()


@in_cuda_tree
def check_restored() -> None:
    import vllm.platforms

    before = vllm.platforms.current_platform
    with engine.device_of(gpus((8, 6))):
        inside: Any = vllm.platforms.current_platform
        assert inside.has_device_capability(86)
        assert not inside.has_device_capability(89)
        assert "vllm._flashmla_C" in sys.modules
    assert vllm.platforms.current_platform is before
    assert "vllm._flashmla_C" not in sys.modules
    with engine.device_of(gpus(None)):
        assert vllm.platforms.current_platform is before


def test_the_platform_comes_back() -> None:
    check_restored()


@in_cuda_tree
def check_pages(config: GlmDsaConfig, option: str, drafts: bool) -> None:
    """Bytes of a block, by the specs that layers give and the release's planning."""
    import torch

    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.core import kv_cache_planning as planning
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole
    from vllm.v1.kv_cache_layout import KVCacheLayout

    backends: list[Any] = [
        AttentionBackendEnum["TRITON_MLA_SPARSE"].get_class(),
        DeepseekV32IndexerBackend,
    ]
    view = engine._view(config, ALONE, "bfloat16", option)
    view.model_config.dtype = torch.bfloat16
    view.scheduler_config = SimpleNamespace(disable_hybrid_kv_cache_manager=False)
    block = current_platform._preferred_block_size_for_backends(backends, 16, view)
    assert block == memory.BLOCK_TOKENS["cuda"]
    view.cache_config.block_size = block
    layers = config.num_layers if drafts else config.num_hidden_layers
    specs = {}
    for layer in range(layers):
        owner = config.has_indexer(layer)
        attention: Any = SimpleNamespace(
            kv_cache_dtype=option,
            head_size=576,
            sliding_window=None,
            topk_buffer_width=2048,
            indexer=1 if owner else None,
            non_causal_multi_token_decode=False,
        )
        spec = MLAAttention.get_kv_cache_spec(attention, view)
        specs[f"{layer}.attn"] = backends[0].customize_spec(spec)
        if owner:
            # As DeepseekV32IndexerCache, whose module takes a device to be imported.
            spec = MLAAttentionSpec(
                block_size=block,
                num_kv_heads=1,
                max_tp_shards=1,
                head_size=132,
                dtype=torch.uint8,
                cache_role=SparseCacheRole.INDEXER,
            )
            specs[f"{layer}.index"] = backends[1].customize_spec(spec)
    groups = planning.get_kv_cache_groups(view, specs)
    [group] = groups
    assert len(group.layer_names) == len(specs)
    planned = planning._get_kv_cache_bytes_per_block(groups, KVCacheLayout.LBNHC)
    form = memory.cache_format(config, "cuda", option, 2)
    assert planned == block * sum(
        memory.token_bytes(config, ALONE, form, drafts=drafts)
    )


@pytest.mark.parametrize("drafts", [False, True], ids=["alone", "drafting"])
@pytest.mark.parametrize("option", ["auto", "bfloat16", "fp8", "fp8_ds_mla"])
def test_a_block_is_as_large_as_the_release_plans_it(
    config: GlmDsaConfig, option: str, drafts: bool
) -> None:
    check_pages(config, option, drafts)


@in_cuda_tree
def check_workspace(config: GlmDsaConfig, length: int) -> None:
    from vllm.model_executor.layers import sparse_attn_indexer
    from vllm.v1.attention.backends.mla.indexer import get_max_prefill_buffer_size

    factor = memory.workspace_factor(length)
    view: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=length),
        attention_config=SimpleNamespace(sparse_mla_prefill_workspace_factor=factor),
    )
    shapes = sparse_attn_indexer._gather_workspace_shapes(
        get_max_prefill_buffer_size(view), config.index_head_dim, None, False
    )
    taken = sum(rows * columns for (rows, columns), _ in shapes)
    taken += sparse_attn_indexer.RADIX_TOPK_WORKSPACE_SIZE
    form = memory.cache_format(config, "cuda", "auto", 2)
    load = memory.Load(length, 8192, 2, "TRITON_MLA_SPARSE", form, True)
    found = memory.buffers(config, "cuda", ALONE, load, drafts=False)
    assert found["workspace"] == taken


@pytest.mark.parametrize("length", [4096, 262_144, 262_145, 1_048_576])
def test_the_indexers_workspace_is_that_of_the_release(
    config: GlmDsaConfig, length: int
) -> None:
    check_workspace(config, length)


@in_cuda_tree
def check_batched_tokens(machine: Machine, name: str) -> None:
    from unittest import mock

    from vllm import EngineArgs
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext

    platform = mock.Mock(spec_set=arg_utils.current_platform)
    platform.get_device_total_memory.return_value = machine.memory
    platform.get_device_name.return_value = name
    platform.is_device_capability.side_effect = lambda c: c == machine.capability
    platform.is_tpu.return_value = platform.is_cpu.return_value = False
    with mock.patch.object(arg_utils, "current_platform", platform):
        tokens, _ = EngineArgs.get_batch_defaults(8)
    expected = tokens[UsageContext.OPENAI_API_SERVER]
    assert memory.default_batched_tokens(machine) == expected


@pytest.mark.parametrize(
    ("capability", "size", "name"),
    [
        ((12, 0), 96, "NVIDIA RTX PRO 6000"),
        ((12, 0), 32, "NVIDIA GeForce RTX 5090"),
        ((12, 1), 120, "NVIDIA GB10"),
        ((8, 0), 80, "NVIDIA A100-SXM4-80GB"),
        ((9, 0), 140, "NVIDIA H200"),
        ((10, 0), 178, "NVIDIA B200"),
    ],
)
def test_the_size_of_a_batch_is_that_of_the_release(
    capability: tuple[int, int], size: int, name: str
) -> None:
    check_batched_tokens(gpus(capability, size), name)


@in_cuda_tree
def check_verdicts(path: Path) -> None:
    from vllm.transformers_utils.gguf.doctor.diagnosis import diagnose
    from vllm.transformers_utils.gguf.doctor.trial import Request

    request = Request(tokenizer="glm")
    eight = diagnose(path, gpus((12, 0)), request)
    assert eight.runs, eight.findings
    assert eight.trial is not None
    assert eight.trial.split == ALONE
    assert eight.command is not None
    assert "--tensor-parallel-size 8" in eight.command
    # Blocks are computed on the GPU, in CUDA graphs.
    assert "--enforce-eager" not in eight.command
    assert {finding.level for finding in eight.findings} == {"note"}
    kept = {row.kind for row in eight.paths if row.path.startswith("GGUF blocks")}
    assert kept >= {"embedding", "attention projections", "routed experts", "LM head"}
    assert all("GGUF blocks" in row.path for row in eight.paths if row.kind in kept)
    # 435 GiB on 4 of them: not with any split.
    four = Machine("cuda", 4, 96 * GIB, (12, 0), "GPU", False)
    assert diagnose(path, four, request).runs is False
    old = diagnose(path, gpus((7, 5)), request)
    assert old.runs is False
    assert old.command is None
    assert "compute capability not supported" in old.findings[0].text


def test_verdict(tmp_path: Path) -> None:
    check_verdicts(write_glm5(tmp_path))
