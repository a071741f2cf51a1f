"""Shapes of the shipped profiles: what every family is instantiated for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """Dimensions of one profile."""

    name: str
    dim: int
    q: int
    kv: int
    head_dim: int
    ffn: int
    vocab: int
    vocab_known: int
    eps: float
    qkv_bias: bool

    @property
    def qkv(self):
        """Width of a `[q | k | v]` row."""
        return (self.q + 2 * self.kv) * self.head_dim

    @property
    def attn(self):
        """Width of the attention output."""
        return self.q * self.head_dim


MODELS = (
    Model("qwen2.5-1.5b", 1536, 12, 2, 128, 8960, 151936, 151665, 1e-6, True),
    Model("qwen2.5-0.5b", 896, 14, 2, 64, 4864, 151936, 151665, 1e-6, True),
    Model("smollm2-135m", 576, 9, 3, 64, 1536, 49152, 49152, 1e-5, False),
    Model("oxide-tiny", 256, 4, 2, 64, 768, 4096, 4096, 1e-6, True),
)

PAGE_TOKENS = (16,)
TOKENS_MAX = 8192
SEQS_MAX = 256
