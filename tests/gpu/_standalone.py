# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Import kernels of this working tree without an installed fork.

`use()` must run before anything of `vllm` is imported. Where vLLM is installed, its
packages that hold kernels, `vllm.v1.attention.ops` above all, get this tree's folders
in front. Where it is not, empty packages stand in for it and `vllm.triton_utils` gives
the real Triton: torch and triton suffice, and gguf for kernels on GGUF blocks.
"""

import importlib
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_OPS = "vllm.v1.attention.ops"
GGUF = ("vllm.model_executor.layers.quantization", "vllm.transformers_utils")
"""For `use`: the packages with kernels on GGUF blocks, and what those import."""


def vllm_installed() -> bool:
    """Whether a real `vllm` package, not only this tree's folder, can be imported."""
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None


def use(
    root: Path = ROOT,
    *,
    alone: bool | None = None,
    packages: Iterable[str] = (_OPS,),
) -> None:
    """Make `packages` of this tree, `tests` and `benchmarks` importable.

    Args:
        root: folder that holds `vllm/v1/attention/ops/sparse_mla`.
        alone: leave an installed vLLM unused; by default only if there is none.
        packages: those of an installed vLLM that get this tree's folders in front.
    """
    for name in ("tests", "benchmarks"):
        _package(name, ROOT / name)
    if alone is None:
        alone = not vllm_installed()
    if alone:
        _stand_in(root)
    else:
        for name in packages:
            importlib.import_module(name).__path__.insert(0, str(_folder(root, name)))


def _stand_in(root: Path) -> None:
    if "vllm" in sys.modules:
        raise RuntimeError("vllm is imported already; call _standalone.use() before")
    parts = _OPS.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        _package(name, _folder(root, name))
    import triton
    import triton.language as tl

    utils = types.ModuleType("vllm.triton_utils")
    utils.triton, utils.tl, utils.HAS_TRITON = triton, tl, True
    sys.modules[utils.__name__] = utils
    logger = types.ModuleType("vllm.logger")
    logger.init_logger = _logger
    sys.modules[logger.__name__] = logger


def load_extension(path: Path | None) -> None:
    """Have `import vllm._glm_dsa_C` give the library at `path`.

    Without one, it stays what is installed; ImportError if that is nothing.
    """
    name = "vllm._glm_dsa_C"
    if path is None:
        importlib.import_module(name)
        return
    import torch  # noqa: F401  its libraries have to be there first

    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no extension module: its name must end in .so")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = sys.modules["vllm"]._glm_dsa_C = module


def _folder(root: Path, name: str) -> Path:
    return root.joinpath(*name.split("."))


def _package(name: str, folder: Path) -> None:
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package


def asked_capability(text: str | None) -> tuple[int, int] | None:
    """The compute capability `text`, like 8.9, else that of TRITON_OVERRIDE_ARCH."""
    if text:
        major, minor = text.split(".")
        return int(major), int(minor)
    if digits := os.environ.get("TRITON_OVERRIDE_ARCH", "").removeprefix("sm"):
        return int(digits[:-1]), int(digits[-1])
    return None


def pretend(capability: tuple[int, int] | None) -> None:
    """Have the kernels configured as on a device of another capability."""
    if capability is None:
        return
    import torch

    kernels = importlib.import_module(f"{_OPS}.sparse_mla.triton_sparse_mla")
    count = torch.cuda.get_device_properties(0).multi_processor_count
    kernels._device = lambda device: (capability, count)


def _logger(name: str) -> logging.Logger:
    """One with vLLM's method for what is said once."""
    made = logging.getLogger(name)
    made.warning_once = made.warning  # type: ignore[attr-defined]
    return made
