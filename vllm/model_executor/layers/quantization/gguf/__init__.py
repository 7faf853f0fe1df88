# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Quantization method "gguf_native": layers that keep the blocks of a GGUF file."""
