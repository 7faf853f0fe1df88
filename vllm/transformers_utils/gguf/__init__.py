# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""GGUF files without torch: container, glm-dsa metadata, tokenizer, artifacts.

Import the modules by name; this package imports none of them.
"""
