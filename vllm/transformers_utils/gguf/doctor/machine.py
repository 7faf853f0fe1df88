# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The machine that is to serve: given by options, or found."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

GIB = 1 << 30

Kind = Literal["cuda", "cpu"]


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs of one kind, or the CPU.

    `memory` is that of one GPU or of the host, in bytes. `capability` is the compute
    capability, None for the CPU or where nobody told it. `here` tells that it is the
    machine at hand.
    """

    kind: Kind
    devices: int
    memory: int
    capability: tuple[int, int] | None
    name: str
    here: bool

    @property
    def title(self) -> str:
        size = f"{self.memory / GIB:.1f} GiB"
        if self.kind == "cpu":
            return f"{self.name}, {size}"
        capability = ".".join(map(str, self.capability or ()))
        tail = f", compute capability {capability}" if capability else ""
        return f"{self.devices} x {self.name}, {size} each{tail}"


class MachineError(ValueError):
    """The machine is not known: the message says which option tells it."""


def given_machine(
    found: Machine | None,
    *,
    gpus: int | None,
    gpu_memory: float | None,
    capability: tuple[int, int] | None,
) -> Machine:
    """The GPUs that the options describe; what they leave open is that of `found`.

    `gpu_memory` is in GiB. Raises MachineError if neither tells the memory.
    """
    base = found if found is not None and found.kind == "cuda" else None
    if gpu_memory is not None:
        memory = int(gpu_memory * GIB)
    elif base is not None:
        memory = base.memory
    else:
        raise MachineError("no NVIDIA GPU was found: --gpu-memory GIB tells its memory")
    same = (
        base is not None
        and gpu_memory is None
        and capability in (None, base.capability)
    )
    return Machine(
        kind="cuda",
        devices=gpus or (base.devices if base is not None else 1),
        memory=memory,
        capability=capability or (base.capability if base is not None else None),
        name=base.name if base is not None and same else "GPU",
        here=same,
    )


def find_machine(kind: Kind) -> Machine | None:
    """The machine at hand, as `kind` sees it; None if there is none of that kind."""
    if kind == "cpu":
        return Machine("cpu", 1, host_memory(), None, "CPU", True)
    return _find_gpus()


def host_memory() -> int:
    """Bytes of the first memory node, or of the container if that has less."""
    from vllm.utils.cpu_resource_utils import get_memory_node_info

    return int(get_memory_node_info().total_memory)


def _find_gpus() -> Machine | None:
    """All GPUs that NVML shows, as the first one of them."""
    from vllm.third_party import pynvml

    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        count = nvml.nvmlDeviceGetCount()
        handles: Sequence[Any] = [
            nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)
        ]
        if not handles:
            return None
        # The smallest memory decides what fits.
        memory = min(nvml.nvmlDeviceGetMemoryInfo(handle).total for handle in handles)
        capability = nvml.nvmlDeviceGetCudaComputeCapability(handles[0])
        name = nvml.nvmlDeviceGetName(handles[0])
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()
    return Machine("cuda", count, int(memory), tuple(capability), str(name), True)
