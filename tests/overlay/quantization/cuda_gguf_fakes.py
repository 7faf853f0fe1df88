# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The extension's operators on GGUF blocks, computed on the host by gguf-py.

They take what the schemas in csrc/bindings.cpp say, refuse what the kernels refuse, and
write what these are to write. Imported where kernels are interpreted: nothing of the
release.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tests.helpers.gguf_random import expected_weights
from vllm.model_executor.layers.quantization.gguf.cuda_extension import alignment
from vllm.transformers_utils.gguf.ggml_types import GGMLType, ggml_type

CSRC = Path(__file__).parents[3] / "csrc"
_DEFINED = re.compile(r"m\.def\(\s*((?:\"[^\"]*\"\s*)+)\)")


def schemas() -> dict[str, torch._C.FunctionSchema]:
    """What csrc/bindings.cpp defines, by name without the namespace."""
    found = {}
    for match in _DEFINED.finditer((CSRC / "bindings.cpp").read_text("utf-8")):
        text = "".join(re.findall(r"\"([^\"]*)\"", match[1]))
        found[text.partition("(")[0]] = torch._C.parse_schema(text)
    return found


class FakeOps:
    """Operators by name, for `torch.ops.vllm_glm_dsa`, which note their calls.

    calls: of each call the operator's name and its arguments by theirs.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        computed: dict[str, Callable[..., Any]] = {
            "gguf_has_kernels": lambda device: True,
            "gguf_skinny_linear": skinny_linear,
            "gguf_skinny_experts": skinny_experts,
            "gguf_tiles_linear": tiles_linear,
            "gguf_tiles_experts": tiles_experts,
        }
        self.by_name = {
            name: self._operator(name, schema, computed[name])
            for name, schema in schemas().items()
        }

    def _operator(
        self, name: str, schema: torch._C.FunctionSchema, compute: Callable[..., Any]
    ) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            bound = {a.name: a.default_value for a in schema.arguments}
            assert len(args) <= len(bound), f"{name} takes {len(bound)} arguments"
            for argument, value in zip(schema.arguments, args, strict=False):
                wanted = torch.Tensor if str(argument.type) == "Tensor" else int
                assert isinstance(value, wanted), f"{name}: {argument.name} is {value}"
                bound[argument.name] = value
            missing = [a.name for a in schema.arguments[len(args) :] if a.name]
            assert all(bound[each] is not None for each in missing), missing
            self.calls.append((name, bound))
            return compute(**bound)

        return call

    def install(self, patch: Callable[..., None]) -> "FakeOps":
        """Put them in place by `patch`, such as monkeypatch.setattr."""
        for name, operator in self.by_name.items():
            patch(torch.ops.vllm_glm_dsa, name, operator, raising=False)
        return self

    def sizes(self) -> list[tuple[str, int | None]]:
        """Of each call the operator, without `gguf_`, and its tile, if it has one."""
        return [(name[5:], args.get("tile")) for name, args in self.calls]


def _weights(
    blocks: torch.Tensor, kind: GGMLType, columns: int, round_to: torch.dtype | None
) -> torch.Tensor:
    """float64 [rows, columns] of uint8 [rows, row bytes or more]."""
    raw = blocks[:, : kind.row_bytes(columns)]
    weights = expected_weights(kind, raw)
    return (weights if round_to is None else weights.to(round_to)).double()


def _check(x: torch.Tensor, kind: GGMLType, *places: int) -> None:
    align = alignment(kind)
    if any(place % align for place in places):
        raise RuntimeError(f"rows must begin at multiples of {align} bytes")
    if x.data_ptr() % 16 or x.stride(0) * x.element_size() % 16:
        raise RuntimeError("x must begin at multiples of 16 bytes")
    if x.shape[1] % 256:
        raise RuntimeError(f"columns must be a multiple of 256, not {x.shape[1]}")


def _linear(
    out: torch.Tensor,
    x: torch.Tensor,
    blocks: torch.Tensor,
    type: int,
    round_to: torch.dtype | None,
) -> None:
    if out.shape != (len(x), len(blocks)):
        raise RuntimeError("out must be [tokens, rows]")
    if type not in {schema_type for schema_type, _ in types_of_header()}:
        raise RuntimeError(f"no kernel for blocks of ggml type {type}")
    kind = ggml_type(type)
    _check(x, kind, blocks.data_ptr(), blocks.stride(0))
    weights = _weights(blocks, kind, x.shape[1], round_to).to(x.device)
    out.copy_(x.double() @ weights.t())


def types_of_header() -> list[tuple[int, str]]:
    """Numbers and names of the types in csrc/gguf/types.cuh."""
    text = (CSRC / "gguf" / "types.cuh").read_text("utf-8")
    return [(int(n), name) for n, name in re.findall(r"DO\((\d+), (\w+)\)", text)]


def skinny_linear(
    out: torch.Tensor,
    x: torch.Tensor,
    blocks: torch.Tensor,
    table: torch.Tensor,
    type: int,
    row_warps: int,
    stages: int,
) -> None:
    _linear(out, x, blocks, type, None)


def tiles_linear(
    out: torch.Tensor,
    x: torch.Tensor,
    blocks: torch.Tensor,
    table: torch.Tensor,
    type: int,
    tile: int,
) -> None:
    if tile not in (32, 128):
        raise RuntimeError("launch failed: invalid argument")
    _linear(out, x, blocks, type, x.dtype)


def skinny_experts(
    out: torch.Tensor,
    hidden: torch.Tensor,
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    router: torch.Tensor,
    ids: torch.Tensor,
    table13: torch.Tensor,
    table2: torch.Tensor,
    type13: int,
    type2: int,
    row_warps: int,
    stages: int,
) -> None:
    inner, width, top_k = hidden.shape[1], x.shape[1], ids.shape[1]
    if router.dtype != torch.float32 or ids.dtype != torch.int64:
        raise RuntimeError("router or ids has another dtype")
    if not (ids.is_contiguous() and router.is_contiguous()):
        raise RuntimeError("ids and router must be contiguous")
    if top_k > 32:
        raise RuntimeError(f"top-k must be at most 32, not {top_k}")
    up = w13.shape[1] // 2
    _check(x, ggml_type(type13), w13.data_ptr(), w13.stride(0), up)
    _check(hidden, ggml_type(type2), w2.data_ptr(), w2.stride(0))
    for token, row in enumerate(x.double()):
        total = row.new_zeros(width)
        for choice in range(top_k):
            expert = int(ids[token, choice])
            if expert < 0:
                continue
            both = w13[expert].view(2 * inner, -1)
            gate_up = _weights(both, ggml_type(type13), width, None)
            gate, up_values = (gate_up @ row).chunk(2)
            slot = token * top_k + choice
            hidden[slot] = F.silu(gate) * up_values
            down = _weights(w2[expert].view(width, -1), ggml_type(type2), inner, None)
            total += router[token, choice].double() * (down @ hidden[slot].double())
        out[token] = total


def tiles_experts(
    out: torch.Tensor,
    x: torch.Tensor,
    blocks: torch.Tensor,
    order: torch.Tensor,
    tiles: torch.Tensor,
    table: torch.Tensor,
    type: int,
    row_bytes: int,
    top_k: int,
    tile: int,
) -> None:
    kind, rows = ggml_type(type), out.shape[1]
    if tile not in (32, 128):
        raise RuntimeError("launch failed: invalid argument")
    if blocks.shape[1] < (2 if top_k else 1) * rows * row_bytes:
        raise RuntimeError(f"blocks must have {rows} rows of {row_bytes} bytes")
    if len(order) != len(out) or len(x) * max(top_k, 1) != len(out):
        raise RuntimeError("order and out must be of all slots")
    _check(x, kind, blocks.data_ptr(), blocks.stride(0))
    for expert, first, end in tiles[:-1].view(3, -1)[:, : tiles[-1]].t().tolist():
        slots = range(first, min(first + tile, end))
        some = blocks[expert, : (2 if top_k else 1) * rows * row_bytes]
        weights = _weights(some.view(-1, row_bytes), kind, x.shape[1], x.dtype)
        if top_k:
            values = x[order[slots] // top_k].double() @ weights.t()
            gate, up = values.chunk(2, 1)
            out[slots] = (F.silu(gate) * up).to(out.dtype)
        else:
            out[order[slots]] = (x[slots].double() @ weights.t()).to(out.dtype)
