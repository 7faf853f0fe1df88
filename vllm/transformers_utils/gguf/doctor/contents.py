# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""What a glm-dsa file holds, for people: model, layers, bytes by kind and type."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from vllm.transformers_utils.gguf.glm_dsa import GlmDsaConfig
from vllm.transformers_utils.gguf.plan import LoadPlan
from vllm.transformers_utils.gguf.reader import GGUFFile

# Kind of tensor -> what its name has after `blk.N.`; the first that matches counts.
_KINDS = (
    ("routed experts, gate and up", r"ffn_(gate|up|gate_up)_exps\."),
    ("routed experts, down", r"ffn_down_exps\."),
    ("shared experts", r"ffn_\w+_shexp\."),
    ("router", r"(ffn_gate_inp|exp_probs_b)\."),
    ("dense feed-forward", r"ffn_(gate|up|down)\."),
    ("indexer", r"indexer\."),
    ("norms", r"\w+_norm\."),
    ("attention", r"attn_"),
)
_GLOBAL_KINDS = {"token_embd": "embedding", "output": "LM head", "output_norm": "norms"}
MTP_KIND = "MTP block"
UNUSED_KIND = "not used"

# General.name and its like: "GLM-5.2", "Glm 5", "glm5.1".
_NAME = re.compile(r"glm[-_ ]?(5(?:\.[123])?)(?![.\d])", re.IGNORECASE)
_NAME_KEYS = ("general.name", "general.basename", "general.base_model.0.name")


@dataclass(frozen=True, slots=True)
class QuantizationRow:
    """The tensors of one kind and type."""

    kind: str
    type: str
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Contents:
    """What the report says about the file itself.

    `indexer_layers` are the hidden layers that compute their own top-k; the MTP block
    always does. `parameters` counts all elements of all tensors.
    """

    name: str | None
    family: str
    files: tuple[str, ...]
    total_bytes: int
    parameters: int
    hidden_layers: int
    dense_layers: int
    mtp_layers: int
    indexer_layers: tuple[int, ...]
    context: int
    experts: int
    experts_used: int
    index_topk: int
    quantization: tuple[QuantizationRow, ...]

    @property
    def shares_indexers(self) -> bool:
        return len(self.indexer_layers) < self.hidden_layers


def describe_contents(file: GGUFFile, plan: LoadPlan) -> Contents:
    """Read what to say from the header of `file` and its load plan."""
    config = plan.config
    name = next(
        (str(file.metadata[key]) for key in _NAME_KEYS if file.metadata.get(key)), None
    )
    return Contents(
        name=name,
        family=_family(file, config),
        files=tuple(str(path) for path in file.paths),
        total_bytes=file.total_bytes,
        parameters=sum(_elements(info.dims) for info in file.tensors.values()),
        hidden_layers=config.num_hidden_layers,
        dense_layers=config.first_k_dense_replace,
        mtp_layers=config.num_nextn_predict_layers,
        indexer_layers=tuple(i for i, full in enumerate(config.indexer_full) if full),
        context=config.max_position_embeddings,
        experts=config.n_routed_experts,
        experts_used=config.num_experts_per_tok,
        index_topk=config.index_topk,
        quantization=_quantization(file, plan),
    )


def _elements(dims: Iterable[int]) -> int:
    count = 1
    for dim in dims:
        count *= dim
    return count


def _family(file: GGUFFile, config: GlmDsaConfig) -> str:
    """Which GLM-5 it is: sizes tell two of them apart, the name the rest."""
    shape = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads)
    if shape != (78, 6144, 64):
        return "another model of the glm-dsa architecture"
    shared = not all(config.indexer_full)
    candidates = ("5.2", "5.3") if shared else ("5", "5.1")
    named = {
        match[1]
        for key in _NAME_KEYS
        if (match := _NAME.search(str(file.metadata.get(key, ""))))
    }
    for version in named:
        if version in candidates:
            return f"GLM-{version}"
    return " or ".join(f"GLM-{version}" for version in candidates)


def _quantization(file: GGUFFile, plan: LoadPlan) -> tuple[QuantizationRow, ...]:
    """Rows in the order of the kinds, the largest type of a kind first."""
    used = {
        source.name for weight in (*plan.main, *plan.mtp) for source in weight.sources
    }
    table: dict[tuple[str, str], list[int]] = {}
    for name, info in file.tensors.items():
        kind = _kind(name, plan.config) if name in used else UNUSED_KIND
        entry = table.setdefault((kind, info.type.name), [0, 0])
        entry[0] += 1
        entry[1] += info.nbytes
    order = {kind: i for i, kind in enumerate(kinds())}
    rows = [
        QuantizationRow(kind, type_name, tensors, nbytes)
        for (kind, type_name), (tensors, nbytes) in table.items()
    ]
    return tuple(sorted(rows, key=lambda row: (order[row.kind], -row.bytes, row.type)))


def kinds() -> tuple[str, ...]:
    """All kinds of tensors, in the order of the report."""
    inside = [kind for kind, _ in _KINDS if kind != "norms"]
    return (*inside, "embedding", "LM head", "norms", MTP_KIND, UNUSED_KIND)


def _kind(name: str, config: GlmDsaConfig) -> str:
    head, _, rest = name.partition(".")
    if head != "blk":
        return _GLOBAL_KINDS[head]
    layer, _, part = rest.partition(".")
    if int(layer) >= config.num_hidden_layers:
        return MTP_KIND
    return next(kind for kind, pattern in _KINDS if re.match(pattern, part))
