# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Write a GLM-DSA GGUF file again with its weights in another ggml type.

Weights are dequantized by gguf-py and quantized by the rules of `tiny_types`, all
blocks alike, the MTP block too; norms, biases, router and indexer.proj stay F32. Keys
keep their order and kinds. K- and I-types need `pip install xllamacpp`.

    python examples/requantize.py IN.gguf OUT.gguf --type Q4_K
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
    ReaderTensor,
)

import ggml_quantize
from tiny_types import MIXED, WEIGHT_TYPES, tensor_type

FILE_TYPE = "general.file_type"
ARCHITECTURE = "general.architecture"
# Kinds of files are named after mixtures; of those the small one is nearest.
_FILE_TYPES = {
    "F32": "ALL_F32",
    "Q3_K": "MOSTLY_Q3_K_S",
    "Q4_K": "MOSTLY_Q4_K_S",
    "Q5_K": "MOSTLY_Q5_K_S",
    "MXFP4": "MOSTLY_MXFP4_MOE",
}


def requantize(source: str | Path, target: str | Path, weight_type: str) -> None:
    """Write the model of `source`, one unsplit file, to `target` in `weight_type`.

    Memory: one tensor in float32 and in its old and new type.

    Raises:
        ValueError: `weight_type` is unknown, `source` is a shard or not of
            architecture glm-dsa, or it would be overwritten.
        ImportError: the type needs `xllamacpp`, which is not installed.
    """
    if weight_type not in WEIGHT_TYPES:
        raise ValueError(
            f"weight type {weight_type!r} is unknown; use one of "
            f"{', '.join(WEIGHT_TYPES)}"
        )
    if Path(target).exists() and Path(target).samefile(source):
        raise ValueError(f"{target} is the source itself; choose another name")
    reader = GGUFReader(source)
    architecture = _key(reader, ARCHITECTURE)
    if architecture != "glm-dsa":
        raise ValueError(f"{source} holds {architecture!r}, expected 'glm-dsa'")
    if (count := _key(reader, "split.count") or 1) > 1:
        raise ValueError(
            f"{source} is one of {count} shards; join them with "
            "`llama-gguf-split --merge` first"
        )
    writer = GGUFWriter(target, architecture)
    _copy_keys(reader, writer, weight_type)
    new_types = [
        GGMLQuantizationType[tensor_type(t.name, _shape(t), weight_type)]
        for t in reader.tensors
    ]
    for tensor, new in zip(reader.tensors, new_types, strict=True):
        block, block_bytes = GGML_QUANT_SIZES[new]
        shape = _shape(tensor)
        size = tensor.n_elements // block * block_bytes
        writer.add_tensor_info(tensor.name, shape, np.dtype("float32"), size, new)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, new in zip(reader.tensors, new_types, strict=True):
        writer.write_tensor_data(_converted(tensor, new))
    writer.close()


def _converted(tensor: ReaderTensor, new: GGMLQuantizationType) -> np.ndarray:
    """The tensor's data in type `new`: uint8 [rows, row bytes]."""
    columns = _shape(tensor)[-1]
    if tensor.tensor_type == new:
        return np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8)
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return ggml_quantize.quantize(new.name, values.reshape(-1, columns))


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    """Sizes with the length of the rows last; the file has it first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def _copy_keys(reader: GGUFReader, writer: GGUFWriter, weight_type: str) -> None:
    for name, kind, element, value in _keys(reader):
        writer.add_key_value(name, value, kind, element)
    if weight_type != MIXED:
        kind_name = _FILE_TYPES.get(weight_type, f"MOSTLY_{weight_type}")
        writer.add_file_type(LlamaFileType[kind_name])
    if _key(reader, "general.quantization_version") is None:
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _keys(
    reader: GGUFReader,
) -> Iterator[tuple[str, GGUFValueType, GGUFValueType | None, object]]:
    """Name, kind, kind of the elements if an array, and value of each kept key."""
    for name, field in reader.fields.items():
        # The writer makes the header's own fields and the architecture.
        if name.startswith(("GGUF.", "split.")) or name in (ARCHITECTURE, FILE_TYPE):
            continue
        element = field.types[1] if len(field.types) > 1 else None
        yield name, field.types[0], element, field.contents()


def _key(reader: GGUFReader, name: str) -> object:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("source", type=Path, help="file to read, IN.gguf")
    parser.add_argument("target", type=Path, help="file to write, OUT.gguf")
    parser.add_argument("--type", choices=WEIGHT_TYPES, required=True)
    options = parser.parse_args()
    try:
        requantize(options.source, options.target, options.type)
    except (ValueError, ImportError, OSError) as error:
        sys.exit(f"error: {error}")
    size = options.target.stat().st_size
    print(f"{options.target}  {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
