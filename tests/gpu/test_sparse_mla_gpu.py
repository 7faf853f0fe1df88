# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The sparse MLA kernels on a GPU against float64: see check_sparse_mla.py."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.gpu import check_sparse_mla

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    check_sparse_mla.compile_in_threads(check_sparse_mla.CALL_GROUPS, 8)


@pytest.mark.parametrize("group", check_sparse_mla.GROUPS)
def test_kernels_equal_float64(group: str) -> None:
    if why := check_sparse_mla.lacks_memory(group):
        pytest.skip(why)
    errors = check_sparse_mla.GROUPS[group]()
    assert errors.compared
    assert not errors.problems, "\n".join(errors.problems)
