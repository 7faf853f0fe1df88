# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Which machine the doctor examines."""

from types import SimpleNamespace

import pytest

from vllm.third_party import pynvml
from vllm.transformers_utils.gguf.doctor.machine import (
    GIB,
    Machine,
    MachineError,
    find_machine,
    given_machine,
)

FOUND = Machine("cuda", 2, 80 * GIB, (9, 0), "NVIDIA H100", True)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """A driver that shows GPUs of these bytes, by number; none at first."""
    sizes: dict[int, int] = {}
    for name, answer in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(sizes),
        "nvmlDeviceGetHandleByIndex": lambda number: number,
        "nvmlDeviceGetMemoryInfo": lambda n: SimpleNamespace(total=sizes[n]),
        "nvmlDeviceGetCudaComputeCapability": lambda n: (12, 0),
        "nvmlDeviceGetName": lambda n: "NVIDIA RTX PRO 6000",
    }.items():
        monkeypatch.setattr(pynvml, name, answer)
    return sizes


def test_gpus_are_found_by_the_smallest_memory(driver: dict[int, int]) -> None:
    driver.update({0: 96 * GIB, 1: 95 * GIB})
    machine = find_machine("cuda")
    assert machine is not None
    assert machine == Machine("cuda", 2, 95 * GIB, (12, 0), "NVIDIA RTX PRO 6000", True)
    assert machine.title == (
        "2 x NVIDIA RTX PRO 6000, 95.0 GiB each, compute capability 12.0"
    )


def test_there_may_be_a_driver_without_gpus(driver: dict[int, int]) -> None:
    assert find_machine("cuda") is None


def test_there_may_be_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert find_machine("cuda") is None


def test_options_complete_what_was_found() -> None:
    more = given_machine(FOUND, gpus=8, gpu_memory=None, capability=None)
    assert more == Machine("cuda", 8, 80 * GIB, (9, 0), "NVIDIA H100", True)
    other = given_machine(FOUND, gpus=None, gpu_memory=None, capability=(12, 0))
    assert other == Machine("cuda", 2, 80 * GIB, (12, 0), "GPU", False)
    larger = given_machine(FOUND, gpus=None, gpu_memory=95.5, capability=None)
    assert larger == Machine("cuda", 2, int(95.5 * GIB), (9, 0), "GPU", False)


def test_options_alone_must_tell_the_memory() -> None:
    host = Machine("cpu", 1, 64 * GIB, None, "CPU", True)
    with pytest.raises(MachineError, match="--gpu-memory"):
        given_machine(host, gpus=8, gpu_memory=None, capability=(12, 0))
    machine = given_machine(host, gpus=None, gpu_memory=96, capability=None)
    assert machine == Machine("cuda", 1, 96 * GIB, None, "GPU", False)


def test_the_host_is_a_machine_too() -> None:
    machine = find_machine("cpu")
    assert machine is not None
    assert machine.kind == "cpu"
    assert machine.memory > GIB
