"""A small GPT (Radford et al. 2019): pre-norm blocks, learned positions, causal self-attention."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from meshtrain.examples.text import VOCABULARY_SIZE


@dataclass(frozen=True)
class GPTConfig:
    """The defaults give about one million parameters, which a single CPU core trains in under a minute."""

    vocabulary_size: int = VOCABULARY_SIZE
    context: int = 64  # tokens that the model sees at once
    num_layers: int = 4
    num_heads: int = 4
    width: int = 144

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} is not divisible by num_heads {self.num_heads}")


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (part.view(batch, time, self.num_heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (batch, head, time, head width)
        out: Tensor = self.project(mixed.transpose(1, 2).reshape(batch, time, width))
        return out


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.project = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        out: Tensor = x + self.project(F.gelu(self.expand(self.norm_mlp(x)), approximate="tanh"))
        return out


class GPT(nn.Module):
    """Maps tokens (batch, time) to logits (batch, time, vocabulary); `time` is at most `config.context`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocabulary_size, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary_size, bias=False)
        # Embeddings keep torch's unit variance: small ones make the first hundred steps learn no more than how
        # frequent each character is. A small head starts from a nearly uniform prediction.
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        if time > self.config.context:
            raise ValueError(f"{time} tokens, but the context holds {self.config.context}")
        x = self.token(tokens) + self.position(torch.arange(time, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
