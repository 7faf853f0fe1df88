# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project

import pytest
import torch

from tests.helpers.gguf_weights import file_tensor, weights
from vllm.model_executor.layers import vocab_parallel_embedding as vocab
from vllm.model_executor.layers.quantization.gguf.config import GGUFConfig
from vllm.transformers_utils.gguf.ggml_types import GGML_TYPES_BY_NAME

pytestmark = pytest.mark.usefixtures("vllm_layers")

VOCAB, HIDDEN = 100, 512


def config(kind: str = "Q4_K") -> GGUFConfig:
    found = GGML_TYPES_BY_NAME[kind]
    return GGUFConfig({"model.embed_tokens": found, "lm_head": found})


def embedding(kind: str = "Q4_K") -> vocab.VocabParallelEmbedding:
    return vocab.VocabParallelEmbedding(
        VOCAB, HIDDEN, quant_config=config(kind), prefix="model.embed_tokens"
    )


def head(kind: str = "Q4_K") -> vocab.ParallelLMHead:
    return vocab.ParallelLMHead(
        VOCAB, HIDDEN, quant_config=config(kind), prefix="lm_head"
    )


def on_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    for name, value in (("rank", rank), ("world_size", size)):
        monkeypatch.setattr(
            vocab, f"get_tensor_model_parallel_{name}", lambda value=value: value
        )


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "IQ4_NL", "Q6_K"])
def test_embedding_gathers_dequantized_rows(kind):
    layer = embedding(kind)
    blocks = file_tensor(kind, VOCAB, HIDDEN)
    layer.qweight.weight_loader(layer.qweight, blocks)
    ids = torch.tensor([[0, 99, 7], [7, 7, 50]])
    out = layer(ids)
    assert out.dtype == torch.float32
    assert torch.equal(out.double(), weights(kind, blocks)[ids])


def test_embedding_dequantizes_only_the_rows_asked_for(monkeypatch):
    layer = embedding()
    layer.qweight.weight_loader(layer.qweight, file_tensor("Q4_K", VOCAB, HIDDEN))
    seen = []
    from vllm.model_executor.layers.quantization.gguf import embedding as module

    inner = module.dequantize
    monkeypatch.setattr(
        module,
        "dequantize",
        lambda rows, *rest: seen.append(rows) or inner(rows, *rest),
    )
    layer(torch.tensor([3, 3]))
    assert [tuple(rows.shape) for rows in seen] == [(2, 288)]


@pytest.mark.parametrize("kind", ["Q4_K", "IQ1_M", "MXFP4", "Q4_0", "TQ1_0"])
def test_logits_of_padding_rows_are_zero(kind):
    layer = head(kind)
    layer.qweight.data.fill_(255)
    blocks = file_tensor(kind, VOCAB, HIDDEN)
    layer.qweight.weight_loader(layer.qweight, blocks)
    x = torch.randn(3, HIDDEN)
    logits = layer.quant_method.apply(layer, x)
    assert logits.shape == (3, 128)
    expected = x.double() @ weights(kind, blocks).t()
    torch.testing.assert_close(
        logits[:, :VOCAB].double(), expected, rtol=1e-5, atol=1e-5
    )
    assert not logits[:, VOCAB:].any()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_vocabulary_parts_make_up_the_whole(monkeypatch, size):
    blocks = file_tensor("Q6_K", VOCAB, HIDDEN)
    parts = []
    for rank in range(size):
        on_rank(monkeypatch, rank, size)
        layer = embedding("Q6_K")
        layer.qweight.data.fill_(255)
        layer.qweight.weight_loader(layer.qweight, blocks)
        parts.append(layer.gguf_shards[0].view(layer.qweight.data))
    table = torch.cat(parts)
    assert table.shape[0] == 128
    assert torch.equal(table[:VOCAB], blocks)
    assert not table[VOCAB:].any()


def test_a_tied_head_uses_the_bytes_of_the_embedding():
    table, lm_head = embedding(), head()
    assert lm_head.tie_weights(table) is lm_head
    assert lm_head.qweight is table.qweight


def test_a_head_cannot_share_a_table_without_blocks():
    plain = vocab.VocabParallelEmbedding(VOCAB, HIDDEN)
    with pytest.raises(ValueError, match="lm_head holds Q4_K blocks"):
        head().tie_weights(plain)


def test_a_table_of_another_vocabulary_is_refused():
    layer = embedding()
    with pytest.raises(ValueError, match="model.embed_tokens: expected 100 rows"):
        layer.qweight.weight_loader(layer.qweight, file_tensor("Q4_K", 90, HIDDEN))


def test_added_tokens_are_refused():
    with pytest.raises(NotImplementedError, match="4 added tokens"):
        vocab.VocabParallelEmbedding(
            VOCAB + 4,
            HIDDEN,
            org_num_embeddings=VOCAB,
            quant_config=config(),
            prefix="model.embed_tokens",
        )
