# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Options of attention layers that no portable sparse MLA backend has."""

from vllm.v1.attention.backend import AttentionType


def refuse_options(
    backend: str,
    *,
    alibi_slopes: list[float] | None,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    kv_sharing_target_layer_name: str | None,
    attn_type: str,
) -> None:
    """Raise NotImplementedError, with the name, for an option that was set.

    Of the types of attention only the decoder's is taken.
    """
    options = {
        "alibi_slopes": alibi_slopes,
        "sliding_window": sliding_window,
        "logits_soft_cap": logits_soft_cap,
        "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
        "attn_type": None if attn_type == AttentionType.DECODER else attn_type,
    }
    for name, value in options.items():
        if value is not None:
            raise NotImplementedError(f"{backend} does not support {name}={value!r}.")
