# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""What gets TRITON_MLA_SPARSE in the fork over the CUDA release."""

import functools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.helpers.cuda_tree import device, in_cuda_tree

NAME = "TRITON_MLA_SPARSE"
RIVAL = "FLASHINFER_MLA_SPARSE_SM120"
CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)]
PLAIN = ["auto", "bfloat16", "float16"]
QUANTIZED = ["fp8", "fp8_e4m3", "fp8_ds_mla"]


def backends():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum


def backend():
    return backends()[NAME].get_class()


@functools.cache
def default_config():
    from vllm.config import VllmConfig

    return VllmConfig()


def selector_config(cache_dtype="auto", **changes):
    from vllm.v1.attention.selector import AttentionSelectorConfig

    options = {
        "head_size": 576,
        "dtype": torch.float16 if cache_dtype == "float16" else torch.bfloat16,
        "kv_cache_dtype": cache_dtype,
        "block_size": None,
        "use_mla": True,
        "use_sparse": True,
    }
    return AttentionSelectorConfig(**{**options, **changes})


def on_device(capability, query):
    """What `query` tells of the platform there, where FlashInfer is present."""
    from vllm.config import set_current_vllm_config
    from vllm.platforms import cuda, current_platform

    import_backend = cuda._get_attn_backend_class

    def without_cutlass(member):
        # The module allocates memory of the device when it is imported.
        if member.name == "CUTLASS_MLA":
            raise ImportError("no device")
        return import_backend(member)

    with (
        device(capability),
        set_current_vllm_config(default_config()),
        mock.patch("vllm.utils.flashinfer.has_flashinfer_sparse_mla_sm120") as api,
        mock.patch.object(cuda, "_get_attn_backend_class", without_cutlass),
    ):
        api.return_value = True
        return query(current_platform)


def selected(capability, config, asked=None):
    """The class name of the backend that the platform selects."""
    path = on_device(capability, lambda p: p.get_attn_backend_cls(asked, config, 8))
    return path.rpartition(".")[2]


def ranking(capability, config):
    """Names of usable backends, and of all that were tried, best first."""
    from vllm.platforms.interface import DeviceCapability

    valid, invalid = on_device(
        capability,
        lambda p: p.get_valid_backends(DeviceCapability(*capability), config, 8),
    )
    tried = {c.backend.name: c.priority for c in valid}
    tried |= {member.name: place for member, (place, _) in invalid.items()}
    return [c.backend.name for c in valid], sorted(tried, key=tried.__getitem__)


@in_cuda_tree
def test_backend_is_registered():
    from vllm.v1.attention.backends.mla.triton_mla_sparse import TritonMLASparseBackend

    assert backend() is TritonMLASparseBackend
    assert backend().get_name() == NAME
    assert backend().is_mla() and backend().is_sparse()


@pytest.mark.parametrize("head_size", [576, 512])
@pytest.mark.parametrize("cache_dtype", PLAIN + QUANTIZED)
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@in_cuda_tree
def test_selected_backends(capability, cache_dtype, head_size):
    config = selector_config(cache_dtype, head_size=head_size)
    valid, tried = ranking(capability, config)
    if capability[0] == 8:
        assert valid == [NAME]
    elif capability[0] == 12:
        taken = cache_dtype == "auto" or cache_dtype in QUANTIZED
        rest = [RIVAL] if taken and config.dtype == torch.bfloat16 else []
        first = cache_dtype not in QUANTIZED
        assert valid == ([NAME, *rest] if first else [*rest, NAME])
        assert tried.count(NAME) == 1 and RIVAL in tried
    else:
        assert valid[-1] == tried[-1] == NAME
    got = selected(capability, config)
    assert (got == "TritonMLASparseBackend") == (valid[0] == NAME)


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@in_cuda_tree
def test_the_release_keeps_its_order(capability, cache_dtype):
    from vllm.platforms.cuda import _get_backend_priorities
    from vllm.platforms.interface import DeviceCapability

    def release():
        # As the platform calls it, or else the cache has another list.
        ranked = _get_backend_priorities(
            use_mla=True,
            device_capability=DeviceCapability(*capability),
            num_heads=8,
            kv_cache_dtype=cache_dtype,
            use_non_causal=False,
            head_size=576,
            use_mm_prefix=False,
        )
        return [member.name for member in ranked]

    _, tried = ranking(capability, selector_config(cache_dtype))
    assert [name for name in tried if name != NAME] == release()
    _, again = ranking(capability, selector_config(cache_dtype))
    assert again == tried
    assert NAME not in release()


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@in_cuda_tree
def test_other_layers_are_left_to_the_release(capability):
    for use_mla in (True, False):
        config = selector_config(head_size=128, use_mla=use_mla, use_sparse=False)
        assert NAME not in ranking(capability, config)[1]


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@in_cuda_tree
def test_backend_can_be_forced(capability):
    for cache_dtype in PLAIN + QUANTIZED:
        got = selected(capability, selector_config(cache_dtype), backends()[NAME])
        assert got == "TritonMLASparseBackend"


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@in_cuda_tree
def test_the_error_names_every_backend_with_its_reasons(capability):
    config = selector_config(use_batch_invariant=True, block_size=48)
    valid, tried = ranking(capability, config)
    assert not valid
    with pytest.raises(ValueError) as caught:
        selected(capability, config)
    message = str(caught.value)
    assert all(f"{name}: [" in message for name in tried)
    ours = message.partition(f"{NAME}: [")[2].partition("]")[0]
    assert ours == "block_size not supported, batch invariance not supported"


@in_cuda_tree
def test_a_forced_backend_that_cannot_run_says_why():
    with pytest.raises(ValueError, match="compute capability not supported"):
        selected((7, 5), selector_config(), backends()[NAME])
    config = selector_config("float16", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="float16 KV cache needs float16 activations"):
        selected((12, 0), config, backends()[NAME])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "dtype not supported"),
        ({"head_size": 320}, "head_size not supported"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "nvfp4_ds_mla"}, "kv_cache_dtype not supported"),
        ({"block_size": 32}, "block_size not supported"),
        ({"has_sink": True}, "attention sinks not supported"),
        ({"use_sparse": False}, "non-sparse not supported"),
        ({"has_sliding_window": True}, "sliding window not supported"),
        ({"kv_cache_dtype": "float16"}, "a float16 KV cache needs float16 activations"),
        (
            {"dtype": torch.float16, "kv_cache_dtype": "bfloat16"},
            "a bfloat16 KV cache needs bfloat16 activations, not float16",
        ),
    ],
    ids=str,
)
@in_cuda_tree
def test_what_the_kernel_lacks_is_refused(changes, reason):
    (got,) = reasons(**changes)
    assert got.startswith(reason)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_dcp": True},
        {"use_pcp": True},
        {"use_kv_connector": True},
        {"use_adaptive_verification": True},
        {"block_size": 192},
        {"dtype": torch.float16, "kv_cache_dtype": "fp8_ds_mla"},
        {"kv_cache_dtype": None},
    ],
    ids=str,
)
@in_cuda_tree
def test_what_the_kernel_has_is_accepted(changes):
    assert reasons(**changes) == []


def reasons(model=None, parallel=None, **changes):
    """Why the backend refuses: options of the selector, of a model, of its split."""
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.mla import triton_mla_sparse

    sizes = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**{**sizes, **(parallel or {})}),
        model_config=model,
    )
    with mock.patch.object(
        triton_mla_sparse, "get_current_vllm_config_or_none", lambda: config
    ):
        return backend().validate_configuration(
            device_capability=DeviceCapability(8, 6),
            **selector_config(**changes)._asdict(),
        )


def model_config(heads=64, **attributes):
    text = {"index_topk": 2048, "kv_lora_rank": 512} | attributes
    return SimpleNamespace(
        hf_text_config=SimpleNamespace(**text),
        get_num_attention_heads=lambda parallel: heads,
    )


@pytest.mark.parametrize(
    ("model", "parallel", "reason"),
    [
        ({"index_topk": None}, {}, "the model has no index_topk"),
        ({"kv_lora_rank": 448}, {}, "kv_lora_rank 448 is not 512"),
        ({"heads": 129}, {}, "129 query heads per rank are more than 128"),
        (
            {"heads": 33},
            {"decode_context_parallel_size": 4},
            "132 query heads per rank are more than 128",
        ),
        (
            {},
            {"decode_context_parallel_size": 2, "prefill_context_parallel_size": 2},
            "prefill and decode context parallelism cannot be combined",
        ),
    ],
)
@in_cuda_tree
def test_models_that_do_not_fit_are_refused(model, parallel, reason):
    assert reasons(model_config(**model), parallel) == [reason]


@in_cuda_tree
def test_models_of_any_head_count_and_topk_fit():
    for heads in (1, 4, 11, 128):
        for topk in (1, 64, 2048, 2176):
            assert reasons(model_config(heads, index_topk=topk)) == []
    split = {"decode_context_parallel_size": 8}
    assert reasons(model_config(16), split) == []


@in_cuda_tree
def test_cache_dtypes_stay_what_they_say():
    from vllm.model_executor.layers.attention.mla_attention import (
        _canonicalize_sparse_mla_kv_cache_dtype as canonical,
    )

    for cache_dtype in PLAIN + QUANTIZED:
        assert canonical(backend(), cache_dtype) == cache_dtype
    rival = backends()[RIVAL].get_class()
    assert canonical(rival, "auto") == "fp8_ds_mla"


@in_cuda_tree
def test_a_bfloat16_cache_of_deepseek_v32_is_not_quantized_on_sm120():
    from vllm.model_executor.models.config import DeepseekV32ForCausalLM

    cache = SimpleNamespace(cache_dtype="bfloat16")
    DeepseekV32ForCausalLM.verify_and_update_config(
        SimpleNamespace(
            cache_config=cache,
            model_config=SimpleNamespace(hf_config=SimpleNamespace(index_topk=2048)),
        )
    )
    for capability in ((12, 0), (12, 1)):
        got = selected(capability, selector_config(cache.cache_dtype))
        assert got == "TritonMLASparseBackend"


@in_cuda_tree
def test_blocks_are_whole_rows_apart():
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    assert backend().get_supported_kernel_block_sizes() == [MultipleOf(64)]
    for options, row in (
        ({"dtype": torch.bfloat16}, 1152),
        ({"dtype": torch.uint8, "state_content_bytes": 656}, 656),
    ):
        spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, **options)
        spec = backend().customize_spec(spec)
        assert spec.get_block_stride_alignment() == row
