# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project

from collections.abc import Iterator

import pytest

from tests.helpers.single_rank import single_rank


@pytest.fixture(scope="package")
def vllm_layers() -> Iterator[None]:
    """vLLM's layers can be made: one rank, with a default config."""
    with single_rank():
        yield
