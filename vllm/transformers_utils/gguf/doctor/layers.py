# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""How each kind of layer is computed, by the load plan."""

import re
from dataclasses import dataclass

from vllm.transformers_utils.gguf.doctor.machine import Kind
from vllm.transformers_utils.gguf.plan import LoadPlan, PlannedWeight

# Kind of layer -> what its modules' names end in; the first that matches counts.
_LAYERS = (
    ("embedding", r"embed_tokens$"),
    ("attention projections", r"self_attn\.(q_a|kv_a|q_b|o)_proj\w*$"),
    ("kv_b projection", r"kv_b_proj$"),
    ("indexer queries", r"indexer\.wq_b$"),
    ("indexer keys and weights", r"indexer\.(wk|weights_proj)$"),
    ("router", r"mlp\.gate$"),
    ("routed experts", r"mlp\.experts\.\w+_proj$"),
    ("shared experts", r"shared_experts\.\w+_proj$"),
    ("dense feed-forward", r"mlp\.\w+_proj$"),
    ("MTP projection", r"eh_proj$"),
    ("LM head", r"lm_head$"),
)
# Why quantized tensors of these are dequantized when they are loaded.
_DEQUANTIZED = {
    "kv_b projection": "k_b and v_b are quantized along different axes",
    "indexer keys and weights": "small, and unquantized in the release",
    "router": "small, and unquantized in the release",
    "MTP projection": "unquantized in the release",
}


FLOAT_TYPES = frozenset({"F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class LayerPath:
    """`kind` of layer, the `types` of its tensors, how it is computed and why so."""

    kind: str
    types: tuple[str, ...]
    path: str
    reason: str


def layer_paths(
    plan: LoadPlan, device: Kind, dtype: str, *, keep_blocks: bool, drafts: bool
) -> tuple[LayerPath, ...]:
    """One entry for each kind of layer and way to compute it, in the model's order."""
    found: dict[tuple[str, bool], set[str]] = {}
    for weight in (*plan.main, *(plan.mtp if drafts else ())):
        kind = _kind(weight)
        if kind is not None:
            kept = weight.blocks and keep_blocks
            types = found.setdefault((kind, kept), set())
            types.update(source.type.name for source in weight.sources)
    order = [kind for kind, _ in _LAYERS]
    return tuple(
        _path(kind, kept, tuple(sorted(types)), device, dtype)
        for (kind, kept), types in sorted(
            found.items(), key=lambda item: (order.index(item[0][0]), item[0][1])
        )
    )


def _kind(weight: PlannedWeight) -> str | None:
    return next((kind for kind, end in _LAYERS if re.search(end, weight.module)), None)


def _path(
    kind: str, kept: bool, types: tuple[str, ...], device: Kind, dtype: str
) -> LayerPath:
    if kept and device == "cuda":
        return LayerPath(kind, types, "GGUF blocks, the fork's kernels", "")
    if kept:
        return LayerPath(kind, types, "GGUF blocks, dequantized for every product", "")
    if not set(types) - FLOAT_TYPES:
        return LayerPath(kind, types, f"{dtype}, the release's kernels", "")
    path = f"dequantized to {dtype} at load, the release's kernels"
    return LayerPath(kind, types, path, _DEQUANTIZED.get(kind, ""))
