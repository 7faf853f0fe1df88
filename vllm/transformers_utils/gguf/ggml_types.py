# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""ggml tensor types: ids, names and block sizes.

A row of a tensor is stored as whole blocks of `block_size` elements, each of
`block_bytes` bytes. Ids that no file may use, or that only ik_llama.cpp reads,
get an error that says so.
"""

from dataclasses import dataclass

from vllm.transformers_utils.gguf.errors import GGUFError


@dataclass(frozen=True, slots=True)
class GGMLType:
    """One storage format of ggml.

    `loadable` is False for formats that are never weights (integers, float64,
    activation formats) or that no dequantizer at hand supports.
    """

    id: int
    name: str
    block_size: int
    block_bytes: int
    loadable: bool = True

    def row_bytes(self, n: int) -> int:
        """Bytes of `n` elements of one row; GGUFError if `n` cuts a block."""
        blocks, rest = divmod(n, self.block_size)
        if rest:
            raise GGUFError(
                f"{n} elements are not whole {self.name} blocks of {self.block_size}"
            )
        return blocks * self.block_bytes


_TYPES = (
    GGMLType(0, "F32", 1, 4),
    GGMLType(1, "F16", 1, 2),
    GGMLType(2, "Q4_0", 32, 18),
    GGMLType(3, "Q4_1", 32, 20),
    GGMLType(6, "Q5_0", 32, 22),
    GGMLType(7, "Q5_1", 32, 24),
    GGMLType(8, "Q8_0", 32, 34),
    GGMLType(9, "Q8_1", 32, 40, loadable=False),
    GGMLType(10, "Q2_K", 256, 84),
    GGMLType(11, "Q3_K", 256, 110),
    GGMLType(12, "Q4_K", 256, 144),
    GGMLType(13, "Q5_K", 256, 176),
    GGMLType(14, "Q6_K", 256, 210),
    GGMLType(15, "Q8_K", 256, 292, loadable=False),
    GGMLType(16, "IQ2_XXS", 256, 66),
    GGMLType(17, "IQ2_XS", 256, 74),
    GGMLType(18, "IQ3_XXS", 256, 98),
    GGMLType(19, "IQ1_S", 256, 50),
    GGMLType(20, "IQ4_NL", 32, 18),
    GGMLType(21, "IQ3_S", 256, 110),
    GGMLType(22, "IQ2_S", 256, 82),
    GGMLType(23, "IQ4_XS", 256, 136),
    GGMLType(24, "I8", 1, 1, loadable=False),
    GGMLType(25, "I16", 1, 2, loadable=False),
    GGMLType(26, "I32", 1, 4, loadable=False),
    GGMLType(27, "I64", 1, 8, loadable=False),
    GGMLType(28, "F64", 1, 8, loadable=False),
    GGMLType(29, "IQ1_M", 256, 56),
    GGMLType(30, "BF16", 1, 2),
    GGMLType(34, "TQ1_0", 256, 54),
    GGMLType(35, "TQ2_0", 256, 66),
    GGMLType(39, "MXFP4", 32, 17),
    GGMLType(40, "NVFP4", 64, 36),
    GGMLType(41, "Q1_0", 128, 18, loadable=False),
    GGMLType(42, "Q2_0", 64, 18, loadable=False),
)
GGML_TYPES: dict[int, GGMLType] = {t.id: t for t in _TYPES}
GGML_TYPES_BY_NAME: dict[str, GGMLType] = {t.name: t for t in _TYPES}

# Formats that ggml had once and dropped; their ids are not used again.
_RETIRED_IDS = frozenset({4, 5, 31, 32, 33, 36, 37, 38})

_IK_LLAMA_IDS = range(133, 400)
_IK_LLAMA_NAMES = {
    133: "Q6_0",
    137: "IQ2_K",
    138: "IQ3_K",
    139: "IQ4_K",
    140: "IQ5_K",
    141: "IQ6_K",
    144: "IQ4_KS",
    145: "IQ2_KS",
    146: "IQ4_KSS",
    152: "IQ5_KS",
    153: "IQ2_KT",
    154: "IQ3_KT",
    155: "IQ4_KT",
    156: "IQ3_KS",
    157: "IQ2_KL",
    158: "IQ1_KT",
    219: "IQ1_S_R4",
    229: "IQ1_M_R4",
}


def ggml_type(type_id: int) -> GGMLType:
    """The type with this id; GGUFError that explains any other id."""
    found = GGML_TYPES.get(type_id)
    if found is not None:
        return found
    if type_id in _IK_LLAMA_IDS:
        name = _IK_LLAMA_NAMES.get(type_id)
        label = f"{type_id} ({name})" if name else str(type_id)
        raise GGUFError(
            f"ggml type id {label} is an ik_llama.cpp-only quantization; "
            "convert with llama.cpp's types"
        )
    if type_id in _RETIRED_IDS:
        raise GGUFError(
            f"ggml type id {type_id} is retired; convert the model again with a "
            "current llama.cpp"
        )
    raise GGUFError(
        f"unknown ggml type id {type_id}, expected one of 0 to {_TYPES[-1].id}; the "
        "file is damaged, or newer than this reader"
    )
