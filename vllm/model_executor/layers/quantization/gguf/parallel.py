# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Which tensor-parallel sizes leave every block whole.

Only matrices that are cut along their input dimension matter: a block never spans
two rows, so cuts between rows, and whole experts, are always possible.
"""

from collections.abc import Mapping

from transformers import PreTrainedConfig

from vllm.transformers_utils.gguf.ggml_types import GGMLType

# Degrees worth telling the user about.
_LARGEST_DEGREE = 64


def fits(kind: GGMLType, columns: int, degree: int) -> bool:
    """Whether rows of `columns` weights can be cut into `degree` parts of blocks."""
    return columns % (kind.block_size * degree) == 0


def check_cut(name: str, kind: GGMLType, columns: int, degree: int) -> None:
    """Raise ValueError if cutting the rows of `name` by `degree` splits a block."""
    if fits(kind, columns, degree):
        return
    working = _working_degrees([(kind, columns)])
    raise ValueError(_message(name, kind, columns, degree, working))


def check_tensor_parallel(
    types: Mapping[str, GGMLType],
    config: PreTrainedConfig,
    *,
    degree: int,
    expert_degree: int,
    shared_expert_degree: int,
) -> None:
    """Check all layers of a GLM-DSA or DeepSeek model before any is made.

    `types`: Hugging Face module name -> type, for the modules that keep blocks.
    `degree` is the tensor-parallel size; `expert_degree` and `shared_expert_degree`
    are the numbers of parts that the rows of a routed and a shared expert's down
    projection are cut into, 1 where whole experts are spread or repeated.
    Raises ValueError that names the first layer whose blocks would be cut, its type,
    and the sizes that work for all layers.
    """
    heads, experts = config.num_attention_heads, config.moe_intermediate_size
    # Module name suffix -> input size and the number of parts it is cut into.
    cut_modules = {
        ".self_attn.o_proj": (heads * config.v_head_dim, degree),
        ".mlp.down_proj": (config.intermediate_size, degree),
        ".mlp.experts.down_proj": (experts, expert_degree),
        ".mlp.shared_experts.down_proj": (
            experts * (config.n_shared_experts or 0),
            shared_expert_degree,
        ),
    }
    cuts = [
        (name, kind, *cut_modules[suffix])
        for name, kind in types.items()
        for suffix in cut_modules
        if name.endswith(suffix)
    ]
    working = _working_degrees(
        [(kind, columns) for _, kind, columns, parts in cuts if parts > 1]
    )
    for name, kind, columns, parts in cuts:
        if not fits(kind, columns, parts):
            raise ValueError(_message(name, kind, columns, parts, working))


def _working_degrees(matrices: list[tuple[GGMLType, int]]) -> list[int]:
    return [
        degree
        for degree in range(1, _LARGEST_DEGREE + 1)
        if all(fits(kind, columns, degree) for kind, columns in matrices)
    ]


def _message(
    name: str, kind: GGMLType, columns: int, degree: int, working: list[int]
) -> str:
    blocks = columns / kind.block_size
    return (
        f"{name}: rows of {columns} weights are {blocks:g} {kind.name} blocks of "
        f"{kind.block_size} weights and cannot be cut into {degree} parts of whole "
        f"blocks. Tensor-parallel sizes that work: "
        f"{', '.join(map(str, working)) or 'none'}. Experts can also be spread whole, "
        "with --enable-expert-parallel."
    )
