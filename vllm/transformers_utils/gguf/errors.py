# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The one exception that a bad GGUF file raises."""


class GGUFError(ValueError):
    """A GGUF file cannot be used.

    The message names the file, what was found, what was expected and what to do
    next, so callers show it as it is.
    """
