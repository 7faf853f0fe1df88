# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Says whether a machine can serve a glm-dsa GGUF file, and how: docs/design/doctor.md.

Import the modules by name; this package imports none of them.
"""
