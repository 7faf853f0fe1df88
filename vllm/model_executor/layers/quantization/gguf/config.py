# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The quantization config "gguf_native": which layers keep the blocks of the file."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import (
    LinearBase,
    QKVParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.quantization.gguf.blocks import is_float
from vllm.model_executor.layers.quantization.gguf.embedding import GGUFEmbeddingMethod
from vllm.model_executor.layers.quantization.gguf.linear import GGUFLinearMethod
from vllm.model_executor.layers.quantization.gguf.moe import ExpertTypes, GGUFMoEMethod
from vllm.model_executor.layers.quantization.gguf.parallel import check_tensor_parallel
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.transformers_utils.gguf.artifacts import load_plan
from vllm.transformers_utils.gguf.ggml_types import GGMLType

_EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

# What the DeepSeek model classes fuse. Their MTP classes do not declare it.
_PACKED_MODULES = {
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}


class GGUFConfig(QuantizationConfig):
    """Keeps the blocks of the modules in `types`; other modules are unquantized.

    `types` maps Hugging Face module names, such as `model.layers.3.self_attn.o_proj`
    or `model.layers.3.mlp.experts.up_proj` (all experts), to the type of their blocks.
    In the engine it is filled from the model's GGUF file. Layers that fuse modules keep
    blocks if at least one of these is quantized; a float module beside it is then kept
    as the raw bytes of its type.
    """

    def __init__(self, types: Mapping[str, GGMLType] | None = None) -> None:
        super().__init__()
        self.types: dict[str, GGMLType] = dict(types or {})
        self._hf_config: PreTrainedConfig | None = None
        self._checked = False

    def get_name(self) -> str:
        return "gguf_native"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "GGUFConfig":
        return cls()

    def maybe_update_config(
        self,
        model_name: str,
        hf_config: PreTrainedConfig | None = None,
        revision: str | None = None,
    ) -> None:
        """Take the types from the file that the model directory was made from.

        Raises GGUFError if `model_name` is not such a directory.
        """
        if hf_config is None:
            raise ValueError(
                f"{model_name}: quantization gguf_native needs the model's config to "
                "check its sizes; this vLLM release did not pass it."
            )
        self.types = load_plan(model_name).block_types()
        self._hf_config = hf_config

    def keeps_blocks(self, module: str) -> bool:
        """Whether the layer with this Hugging Face module holds blocks.

        If so, its bytes are loaded as `<module>.qweight`, else its numbers as
        `<module>.weight`. Names of routed experts have no expert number.
        """
        return any(
            name in self.types and not is_float(self.types[name])
            for name in self._siblings(module)
        )

    def get_quant_method(
        self, layer: torch.nn.Module, prefix: str
    ) -> QuantizeMethodBase | None:
        self._check_parallel()
        if isinstance(layer, RoutedExperts):
            names = [f"{prefix}.{name}" for name in _EXPERT_PROJECTIONS]
            if not self.keeps_blocks(names[0]):
                return UnquantizedFusedMoEMethod(layer.moe_config)
            types = ExpertTypes(*self._kinds(prefix, names))
            return GGUFMoEMethod(prefix, types, layer.moe_config)
        if isinstance(layer, LinearBase):
            names = self._fused(prefix)
            if not self.keeps_blocks(names[0]):
                return UnquantizedLinearMethod()
            if isinstance(layer, QKVParallelLinear):
                raise NotImplementedError(
                    f"{prefix}: a fused query, key and value projection cannot hold "
                    "GGUF blocks. GLM-DSA models have none."
                )
            return GGUFLinearMethod(prefix, self._kinds(prefix, names))
        if isinstance(layer, VocabParallelEmbedding):
            if not self.keeps_blocks(prefix):
                return UnquantizedEmbeddingMethod()
            return GGUFEmbeddingMethod(prefix, self.types[prefix])
        return None

    def _fused(self, prefix: str) -> list[str]:
        """Module names that make up the layer `prefix`, in the order of its rows."""
        parent, dot, last = prefix.rpartition(".")
        packed = _PACKED_MODULES | self.packed_modules_mapping
        return [f"{parent}{dot}{name}" for name in packed.get(last, [last])]

    def _siblings(self, module: str) -> list[str]:
        """Module names that share one layer with `module`, itself included."""
        parent, dot, last = module.rpartition(".")
        if parent.endswith(".experts"):
            return [f"{parent}.{name}" for name in _EXPERT_PROJECTIONS]
        packed = _PACKED_MODULES | self.packed_modules_mapping
        for names in packed.values():
            if last in names:
                return [f"{parent}{dot}{name}" for name in names]
        return [module]

    def _kinds(self, prefix: str, names: list[str]) -> tuple[GGMLType, ...]:
        missing = [name for name in names if name not in self.types]
        if missing:
            raise ValueError(
                f"{prefix} fuses {', '.join(names)}. Some are quantized, so the types "
                f"of all must be known; {', '.join(missing)} has none."
            )
        return tuple(self.types[name] for name in names)

    def _check_parallel(self) -> None:
        """Check the cuts of all layers once, before the first layer is made."""
        vllm_config = get_current_vllm_config_or_none()
        if self._checked or self._hf_config is None or vllm_config is None:
            return
        self._checked = True
        parallel = vllm_config.parallel_config
        # vLLM spreads the rows of experts over data- and context-parallel ranks too.
        ranks = (
            parallel.tensor_parallel_size
            * parallel.data_parallel_size
            * parallel.prefill_context_parallel_size
        )
        degree = parallel.tensor_parallel_size
        check_tensor_parallel(
            self.types,
            self._hf_config,
            degree=degree,
            expert_degree=1 if parallel.enable_expert_parallel else ranks,
            shared_expert_degree=1 if parallel.use_sequence_parallel_moe else degree,
        )
