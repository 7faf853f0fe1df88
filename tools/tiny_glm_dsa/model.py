# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""GLM-5's network for training: MLA, the DSA indexer, GLM's router, the MTP block.

Parameters have the names and layouts of the GGUF file (`blk.0.attn_q_a.weight`), so a
state dict is the file's content. `tests/tools/test_tiny_model.py` holds the network to
transformers' GlmMoeDsa; what transformers lacks, and training needs, is here: attention
weights for the indexer's loss, gradients of the indexer, the MTP block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiny_glm_dsa import TinySpec

# Attention over all earlier tokens; the same, and the indexers learn to predict it;
# over the selection in the layers of the first indexer only; in all layers.
DENSE, WARM_UP, HALF_SPARSE, SPARSE = "dense", "warm-up", "half-sparse", "sparse"


@dataclass
class Output:
    """Logits [batch, length, vocab] for the next token, `mtp_logits` for the one after
    it (position t predicts token t + 2), both in the compute dtype; the mean KL of the
    indexers, in nats; tokens routed to each expert, int64 [experts], per MoE block."""

    logits: Tensor
    mtp_logits: Tensor
    index_loss: Tensor
    loads: list[Tensor] = field(default_factory=list)


class Matrix(nn.Module):
    """A weight without bias, [..., out, in]."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) / math.sqrt(shape[-1]))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Indexer(nn.Module):
    def __init__(self, spec: TinySpec) -> None:
        super().__init__()
        self.heads, self.dim, self.rope = spec.index_heads, spec.index_dim, spec.rope
        self.k_norm = nn.LayerNorm(spec.index_dim, eps=1e-6)
        self.proj = Matrix(spec.index_heads, spec.hidden)
        self.attn_k = Matrix(spec.index_dim, spec.hidden)
        self.attn_q_b = Matrix(spec.index_heads * spec.index_dim, spec.q_lora)

    def forward(self, x: Tensor, q_latent: Tensor, angles: Tensor) -> Tensor:
        """Score of each key for each query: [batch, queries, keys]

        Args:
            x: Normed input of the layer, [batch, length, hidden].
            q_latent: Normed query latent, [batch, length, q_lora].
            angles: Rotation of each position, [length, rope / 2].
        """
        q = self.attn_q_b(q_latent).unflatten(-1, (self.heads, self.dim))
        q = rotate(q, angles[:, None], first=self.rope).transpose(1, 2)
        k = rotate(self.k_norm(self.attn_k(x)), angles, first=self.rope).to(q.dtype)
        weights = self.proj(x).mT.unsqueeze(-1) * (self.heads * self.dim) ** -0.5
        return ((q @ k.mT.unsqueeze(1)).relu() * weights).sum(1, dtype=torch.float32)


class Block(nn.Module):
    """A layer; `full` ones have an indexer, `dense` ones no experts."""

    def __init__(self, spec: TinySpec, *, full: bool, dense: bool) -> None:
        super().__init__()
        self.spec, self.full, self.dense = spec, full, dense
        heads, latent, hidden = spec.heads, spec.kv_lora, spec.hidden
        self.attn_norm = RmsNorm(hidden, spec.eps)
        self.attn_q_a = Matrix(spec.q_lora, hidden)
        self.attn_q_a_norm = RmsNorm(spec.q_lora, spec.eps)
        self.attn_q_b = Matrix(heads * (spec.nope + spec.rope), spec.q_lora)
        self.attn_kv_a_mqa = Matrix(latent + spec.rope, hidden)
        self.attn_kv_a_norm = RmsNorm(latent, spec.eps)
        self.attn_k_b = Matrix(heads, latent, spec.nope)
        self.attn_v_b = Matrix(heads, spec.value, latent)
        self.attn_output = Matrix(hidden, heads * spec.value)
        self.ffn_norm = RmsNorm(hidden, spec.eps)
        with torch.no_grad():  # k_b is stored transposed: its inputs are the latents
            self.attn_k_b.weight.mul_(math.sqrt(spec.nope / latent))
        if full:
            self.indexer = Indexer(spec)
        if dense:
            self._swiglu("", spec.dense_ff)
        else:
            self._swiglu("_shexp", spec.expert_ff)
            self._swiglu("_exps", spec.expert_ff, spec.experts)
            self.ffn_gate_inp = Matrix(spec.experts, hidden)
            self.exp_probs_b = nn.Module()
            self.exp_probs_b.register_buffer("bias", torch.zeros(spec.experts))

    def _swiglu(self, suffix: str, inner: int, *stack: int) -> None:
        for part in ("gate", "up"):
            matrix = Matrix(*stack, inner, self.spec.hidden)
            setattr(self, f"ffn_{part}{suffix}", matrix)
        setattr(self, f"ffn_down{suffix}", Matrix(*stack, self.spec.hidden, inner))

    def queries(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Query latent [batch, length, q_lora] and queries [batch, heads, length, 256].

        The 256 are 192 (nope) and 64 (rope).
        """
        latent = self.attn_q_a_norm(self.attn_q_a(x))
        q = self.attn_q_b(latent).unflatten(-1, (self.spec.heads, -1))
        return latent, rotate(q, angles[:, None], last=self.spec.rope).transpose(1, 2)

    def keys_values(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of each head, [batch, heads, length, 256] both."""
        spec = self.spec
        latent, rope = self.attn_kv_a_mqa(x).split((spec.kv_lora, spec.rope), -1)
        latent = self.attn_kv_a_norm(latent)
        k_b, v_b = self.attn_k_b.weight.mT, self.attn_v_b.weight
        nope = F.linear(latent, k_b.flatten(0, 1)).unflatten(-1, (spec.heads, -1))
        value = F.linear(latent, v_b.flatten(0, 1)).unflatten(-1, (spec.heads, -1))
        rope = rotate(rope, angles).unsqueeze(2).expand(-1, -1, spec.heads, -1)
        keys = torch.cat((nope, rope), -1)
        return keys.transpose(1, 2), value.transpose(1, 2)

    def feed_forward(self, x: Tensor, loads: list[Tensor]) -> Tensor:
        if self.dense:
            return self.ffn_down(F.silu(self.ffn_gate(x)) * self.ffn_up(x))
        shared = F.silu(self.ffn_gate_shexp(x)) * self.ffn_up_shexp(x)
        weights = self._route(x, loads)
        # Every expert runs on every token: at this size cheaper than sorting tokens.
        gate = F.linear(x, self.ffn_gate_exps.weight.flatten(0, 1))
        up = F.linear(x, self.ffn_up_exps.weight.flatten(0, 1))
        inner = (F.silu(gate) * up).unflatten(-1, (self.spec.experts, -1))
        inner = inner * weights.unsqueeze(-1).to(inner.dtype)
        down = self.ffn_down_exps.weight.transpose(0, 1).flatten(1)
        return self.ffn_down_shexp(shared) + F.linear(inner.flatten(-2), down)

    def _route(self, x: Tensor, loads: list[Tensor]) -> Tensor:
        """Weight of each expert, 0 if not chosen: [batch, length, experts]"""
        with torch.autocast(x.device.type, enabled=False):
            scores = self.ffn_gate_inp(x.float()).sigmoid()
        chosen = (scores + self.exp_probs_b.bias).topk(self.spec.experts_used).indices
        picked = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        loads.append(picked.detach().flatten(0, -2).sum(0))
        weights = scores * picked
        return weights / weights.sum(-1, keepdim=True) * self.spec.expert_scale


class TinyGlm(nn.Module):
    """The whole model; `blk` holds the layers and then the MTP block."""

    def __init__(self, spec: TinySpec) -> None:
        super().__init__()
        self.spec = spec
        self.token_embd = Matrix(spec.vocab_size, spec.hidden)
        self.output_norm = RmsNorm(spec.hidden, spec.eps)
        self.output = Matrix(spec.vocab_size, spec.hidden)
        self.blk = nn.ModuleList(
            Block(spec, full=letter == "F", dense=layer < spec.dense_layers)
            for layer, letter in enumerate(spec.pattern + "F")
        )
        mtp = self.blk[-1]
        mtp.nextn = nn.Module()
        mtp.nextn.eh_proj = Matrix(spec.hidden, 2 * spec.hidden)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            setattr(mtp.nextn, name, RmsNorm(spec.hidden, spec.eps))
        with torch.no_grad():
            self.token_embd.weight.mul_(math.sqrt(spec.hidden) * 0.5)
            for block in self.blk:
                block.attn_output.weight.mul_(0.5)

    def forward(
        self, ids: Tensor, mode: str = DENSE, weights: Tensor | None = None
    ) -> Output:
        """Run the model on `ids`, int64 [batch, length], positions from 0.

        Args:
            mode: DENSE, WARM_UP, HALF_SPARSE or SPARSE.
            weights: What the indexers' loss at each position counts, float32 [batch,
                length]; None for all the same.
        """
        run = _Run(self.spec, mode, ids, weights)
        embedded = F.embedding(ids, self.token_embd.weight)
        x = embedded
        for block in self.blk[:-1]:
            x = run.block(block, x)
        x = self.output_norm(x)
        run.finish_index_loss()
        logits = self.output(x)
        mtp_logits = self._predict_after_next(run, x, embedded)
        run.finish_index_loss()
        losses = torch.stack(run.index_losses) if run.index_losses else torch.zeros(1)
        return Output(logits, mtp_logits, losses.mean(), run.loads)

    def _predict_after_next(self, run: _Run, x: Tensor, embedded: Tensor) -> Tensor:
        """MTP: the last hidden state and the token that follows give the one after.

        At position 0 engines leave the token out.
        """
        block = self.blk[-1]
        following = F.pad(embedded[:, 2:], (0, 0, 1, 1))
        joined = torch.cat((block.nextn.enorm(following), block.nextn.hnorm(x)), -1)
        hidden = run.block(block, block.nextn.eh_proj(joined))
        return self.output(block.nextn.shared_head_norm(hidden))


class _Run:
    """What passes between the layers in one forward pass."""

    def __init__(
        self, spec: TinySpec, mode: str, ids: Tensor, weights: Tensor | None
    ) -> None:
        self.spec, self.mode, self.weights = spec, mode, weights
        length = ids.shape[1]
        place = torch.arange(length, device=ids.device)
        rates = spec.rope_theta ** -(
            torch.arange(0, spec.rope, 2, device=ids.device) / spec.rope
        )
        self.angles = place[:, None] * rates
        self.allowed = place[:, None] >= place  # causal, then also the selection
        self.causal = self.allowed
        self.loads: list[Tensor] = []
        self.index_losses: list[Tensor] = []
        self.scores: Tensor | None = None
        self.attended: list[Tensor] = []

    def block(self, block: Block, x: Tensor) -> Tensor:
        normed = block.attn_norm(x)
        latent, q = block.queries(normed, self.angles)
        k, v = block.keys_values(normed, self.angles)
        if block.full and self.mode != DENSE:
            self.finish_index_loss()
            # The indexer learns from its own loss only.
            scores = block.indexer(normed.detach(), latent.detach(), self.angles)
            self.scores = scores.masked_fill(~self.causal, -math.inf)
            first = not self.index_losses
            if self.mode == SPARSE or (self.mode == HALF_SPARSE and first):
                self.allowed = select(self.scores.detach(), self.spec.top_k)
            else:
                self.allowed = self.causal
        x = x + block.attn_output(self._attend(q, k, v).transpose(1, 2).flatten(2))
        return x + block.feed_forward(block.ffn_norm(x), self.loads)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.mode == DENSE:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        allowed = self.allowed if self.allowed.dim() == 2 else self.allowed[:, None]
        scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)
        self.attended.append(weights.detach().mean(1))
        return weights.to(v.dtype) @ v

    def finish_index_loss(self) -> None:
        """KL of the last indexer from the attention of all layers that used it."""
        if self.scores is None:
            return
        target = torch.stack(self.attended).mean(0)
        known = self.scores.masked_fill(~self.allowed, -math.inf).log_softmax(-1)
        terms = torch.xlogy(target, target) - target * known.masked_fill(
            ~self.allowed, 0.0
        )
        loss = terms.sum(-1)
        if self.weights is not None:
            loss = loss * (self.weights / self.weights.mean())
        self.index_losses.append(loss.mean())
        self.scores, self.attended = None, []


def select(scores: Tensor, top_k: int) -> Tensor:
    """Where the `top_k` highest finite scores of each row are: bool, same shape."""
    best = scores.topk(min(top_k, scores.shape[-1]), -1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
    return chosen & scores.isfinite()


def rotate(x: Tensor, angles: Tensor, *, first: int = 0, last: int = 0) -> Tensor:
    """RoPE on pairs of neighbours, in the first or last dimensions, or in all.

    The result holds the even members before the odd ones: dot products are the same.
    """
    size = x.shape[-1]
    start, stop = (0, first) if first else (size - last, size) if last else (0, size)
    even, odd = x[..., start:stop:2].float(), x[..., start + 1 : stop : 2].float()
    cos, sin = angles.cos(), angles.sin()
    turned = torch.cat((even * cos - odd * sin, odd * cos + even * sin), -1)
    parts = (x[..., :start], turned.to(x.dtype), x[..., stop:])
    return torch.cat(parts, -1)
