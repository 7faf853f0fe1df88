# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Builds the fork: a pinned release wheel, a few edits as data, and new modules."""
