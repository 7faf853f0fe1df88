# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Loads the weights of a glm-dsa GGUF file into vLLM's GLM-DSA model.

Weights come in file order, one at a time. With quantization "gguf_native" matrices
are passed on unread (`FileBlocks`), and go as raw blocks from the file to where the
parameters are; everything else, and all of it without quantization, is dequantized on
the host. Host memory beyond the model stays near one tensor on the CPU, and near some
fixed buffers on a GPU.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm

from vllm.config import ModelConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.gguf.blocks import dequantize_rows
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.gguf.file_blocks import BlockReader, FileBlocks
from vllm.model_executor.model_loader.gguf.transport import THREADS
from vllm.model_executor.model_loader.weight_utils import enable_tqdm
from vllm.transformers_utils.gguf.artifacts import gguf_path
from vllm.transformers_utils.gguf.errors import GGUFError
from vllm.transformers_utils.gguf.glm_dsa import GlmDsaConfig
from vllm.transformers_utils.gguf.plan import PlannedWeight, make_plan
from vllm.transformers_utils.gguf.reader import GGUFFile, TensorInfo, open_gguf
from vllm.transformers_utils.gguf.serving import QUANTIZATION, stage_error

logger = init_logger(__name__)

NamedWeight = tuple[str, torch.Tensor | FileBlocks]


class GGUFModelLoader(DefaultModelLoader):
    """Loader of load format "gguf_native".

    The model is a directory made from a GGUF file (see
    `vllm.transformers_utils.gguf.artifacts`); the draft model of MTP speculative
    decoding is loaded from the same file.
    """

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing to download: the file is local."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load all weights, and fail if the model has parameters left without."""
        self._init_ep_weight_filter(model_config)
        path = gguf_path(model_config.model)
        if path is None:
            raise GGUFError(
                f"{model_config.model} was not made from a GGUF file; load format "
                "gguf_native needs a .gguf file as the model"
            )
        is_draft = model_config.hf_config.model_type != "glm_moe_dsa"
        with closing(open_gguf(path)) as file:
            plan = make_plan(file)
            if not is_draft:
                _check_stage(model, plan.config)
            weights = _of_stage(plan.mtp if is_draft else plan.main, model)
            start = time.perf_counter()
            with BlockReader(file, threads=self._threads()) as blocks:
                reader = self._reader(blocks, file, plan.config, model_config)
                loaded = model.load_weights(self._read(reader, weights, file))
            _log_rate(blocks.nbytes, time.perf_counter() - start)
        missing = sorted(
            name
            for name, _ in model.named_parameters()
            if name not in loaded and not (is_draft and _is_shared(name))
        )
        if missing:
            raise GGUFError(
                f"{path}: {len(missing)} parameters of {type(model).__name__} got no "
                f"weight, the first of them {missing[:3]}; this release of vLLM names "
                "its modules differently from what the load plan expects"
            )

    def _threads(self) -> int:
        """Threads that read for a device: vLLM's own option, or the default."""
        options = self.load_config.model_loader_extra_config
        return options.get("num_threads") or THREADS

    def _reader(
        self,
        blocks: BlockReader,
        file: GGUFFile,
        config: GlmDsaConfig,
        model_config: ModelConfig,
    ) -> "_WeightReader":
        return _WeightReader(
            blocks,
            file,
            config,
            dtype=model_config.dtype,
            keep_blocks=model_config.quantization == QUANTIZATION,
            is_local=self._is_local_expert,
        )

    def _read(
        self,
        reader: "_WeightReader",
        weights: tuple[PlannedWeight, ...],
        file: GGUFFile,
    ) -> Iterator[NamedWeight]:
        total = sum(info.nbytes for weight in weights for info in weight.sources)
        progress = tqdm(
            total=total,
            unit="B",
            unit_scale=True,
            desc="Loading GGUF weights",
            disable=not enable_tqdm(self.load_config.use_tqdm_on_load),
        )
        with progress:
            for weight in weights:
                yield from reader.read(weight)
                progress.update(sum(info.nbytes for info in weight.sources))
                # Unmap what was read, or it counts as resident memory.
                file.close()

    def _is_local_expert(self, expert: int) -> bool:
        return self.local_expert_ids is None or expert in self.local_expert_ids


def _of_stage(
    weights: tuple[PlannedWeight, ...], model: nn.Module
) -> tuple[PlannedWeight, ...]:
    """The weights of the pipeline stage that `model` is."""
    # Modules of models import this one.
    from vllm.model_executor.models.utils import PPMissingLayer

    absent = tuple(
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, PPMissingLayer)
    )
    return tuple(weight for weight in weights if not weight.name.startswith(absent))


def _log_rate(nbytes: int, seconds: float) -> None:
    if nbytes:
        logger.info(
            "Read %.2f GiB of GGUF blocks in %.1f s, %.2f GB/s",
            nbytes / 2**30,
            seconds,
            nbytes / seconds / 1e9,
        )


def _is_shared(name: str) -> bool:
    """Whether a parameter of the MTP draft is replaced by the main model's."""
    return "embed_tokens." in name or "shared_head.head." in name


def _check_stage(model: nn.Module, config: GlmDsaConfig) -> None:
    """Refuse a pipeline stage whose first layer would reuse another stage's top-k."""
    first = getattr(getattr(model, "model", None), "start_layer", 0)
    error = stage_error(config, first)
    if error is not None:
        raise GGUFError(error)


class _WeightReader:
    """Makes the tensors of planned weights, on the host, or passes on their blocks."""

    def __init__(
        self,
        blocks: BlockReader,
        file: GGUFFile,
        config: GlmDsaConfig,
        *,
        dtype: torch.dtype,
        keep_blocks: bool,
        is_local: Callable[[int], bool],
    ) -> None:
        self._unread = blocks
        self._file = file
        self._config = config
        self._dtype = dtype
        self._keep_blocks = keep_blocks
        self._is_local = is_local

    def read(self, weight: PlannedWeight) -> Iterator[NamedWeight]:
        """The parameters that `weight` fills, under their checkpoint names."""
        source = weight.sources[0]
        if weight.kind == "kv_b":
            yield weight.name, self._kv_b(*weight.sources)
        elif weight.kind == "experts":
            for expert in filter(self._is_local, range(source.shape[0])):
                name = weight.name.format(expert)
                yield self._matrix(weight, name, source, expert, weight.rows)
        elif len(source.shape) == 1:
            yield weight.name, self._dequantize(source, torch.float32)[0]
        else:
            yield self._matrix(weight, weight.name, source, 0, None)

    def _matrix(
        self,
        weight: PlannedWeight,
        name: str,
        source: TensorInfo,
        index: int,
        rows: tuple[int, int] | None,
    ) -> NamedWeight:
        """Matrix `index` of `source`, as blocks or in a floating-point type."""
        if weight.blocks and self._keep_blocks:
            blocks = self._unread.matrix(source, index, rows)
            return f"{name.removesuffix('weight')}qweight", blocks
        # Small matrices outside the fused kernels (router, indexer weights) may be
        # parameters of float32: keep what the file has and let the copy round.
        dtype = self._dtype if weight.blocks else torch.float32
        return name, self._dequantize(source, dtype, index, rows)

    def _blocks(
        self, source: TensorInfo, index: int = 0, rows: tuple[int, int] | None = None
    ) -> np.ndarray:
        """The bytes of matrix `index`: uint8 [rows, row bytes], a view of the map."""
        matrix_rows = source.shape[-2] if len(source.shape) > 1 else 1
        first, last = rows or (0, matrix_rows)
        row_bytes = source.type.row_bytes(source.shape[-1])
        start = (index * matrix_rows + first) * row_bytes
        data = self._file.data(source)[start : start + (last - first) * row_bytes]
        return np.frombuffer(data, dtype=np.uint8).reshape(last - first, row_bytes)

    def _dequantize(
        self,
        source: TensorInfo,
        dtype: torch.dtype,
        index: int = 0,
        rows: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """Matrix `index` of `source`: `dtype` [rows, columns]."""
        blocks = self._blocks(source, index, rows)
        columns = source.shape[-1]
        out = torch.empty(len(blocks), columns, dtype=dtype)
        dequantize_rows(blocks, source.type, len(blocks), columns, out)
        return out

    def _kv_b(self, k_b: TensorInfo, v_b: TensorInfo) -> torch.Tensor:
        """kv_b_proj [heads * (nope + v), kv_lora_rank] from its absorbed halves.

        The file has k_b as [heads, kv_lora_rank, nope], transposed for absorption,
        and v_b as [heads, v, kv_lora_rank]; per head, k's rows come before v's.
        """
        nope = self._config.qk_nope_head_dim
        heads, rank, _ = k_b.shape
        value = v_b.shape[1]
        out = torch.empty(heads, nope + value, rank, dtype=self._dtype)
        for head in range(heads):
            out[head, :nope] = self._dequantize(k_b, torch.float32, head).T
            out[head, nope:] = self._dequantize(v_b, torch.float32, head)
        return out.view(heads * (nope + value), rank)
