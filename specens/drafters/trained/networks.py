"""The networks of the non-autoregressive drafter: they predict several tokens in one pass, from the
target's hidden states.

Both see, at the last committed token x_t, the hidden states of the positions before it (the target
has not read x_t yet) and the embedding of x_t, and give one hidden vector for each of the next
`num_positions` tokens, which the target's own output projection turns into logits.

- `heads`: a residual block per position on the last hidden state, as in Medusa (Cai et al. 2024,
  arXiv 2401.10774); the embedding of x_t beside it, as in EAGLE (Li et al. 2024, arXiv 2401.15077).
- `block`: a small bidirectional transformer over [x_t, mask, mask, ...] that also attends to the
  whole context, through keys and values made from the target's hidden states at a few layers, as in
  DFlash (Chen et al. 2026, arXiv 2602.06036). Every position is also fed the last hidden state: a
  small network need not first learn to attend to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

from specens.errors import check_choice, check_count

ARCHITECTURES = ("heads", "block")


@dataclass(frozen=True)
class NetworkConfig:
    """Sizes of a network; they travel with its weights. `hidden_layers` are indices of
    transformers' `hidden_states`.
    """

    architecture: str
    hidden_size: int
    hidden_layers: tuple[int, ...]
    num_positions: int = 4
    num_layers: int = 1
    num_heads: int = 8
    num_key_value_heads: int = 8
    head_dim: int = 64
    intermediate_size: int = 1536
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        check_choice("architecture", self.architecture, ARCHITECTURES)
        for name in ("num_positions", "num_layers", "num_heads", "num_key_value_heads", "head_dim"):
            check_count(name, getattr(self, name))

    def build(self) -> Network:
        return Heads(self) if self.architecture == "heads" else Block(self)


class Norm(nn.RMSNorm):
    """In the precision of its weight, also where autocast hands it less."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype))


@dataclass(frozen=True)
class Places:
    """Where a network predicts in training: many positions of several texts in a row.

    `features` `[tokens, layers, hidden_size]` are the target's hidden states, `anchors` `[anchors]`
    the indices of the last committed tokens, `last` `[anchors, hidden_size]` their embeddings,
    `positions` `[tokens]` counts from each text's beginning, `begins` `[tokens]` is the index at
    which each token's text begins.
    """

    features: torch.Tensor
    last: torch.Tensor
    anchors: torch.Tensor
    positions: torch.Tensor
    begins: torch.Tensor


@dataclass(frozen=True)
class Context:
    """What a network has read: `length` positions; per layer keys and values `[heads, length,
    head_dim]` (block), and the last position's hidden states `[layers, hidden_size]`.
    """

    length: int = 0
    states: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    last: torch.Tensor | None = None


class Heads(nn.Module):
    """One residual block per position; all of them one matrix product."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config, size = config, config.hidden_size
        self.join = nn.Linear((len(config.hidden_layers) + 1) * size, size, bias=False)
        self.blocks = nn.Linear(size, config.num_positions * size)
        self.norm = Norm(size, config.norm_epsilon)

    def extend(self, context: Context, features: torch.Tensor) -> Context:
        return Context(context.length + len(features), last=features[-1])

    def propose(self, context: Context, last: torch.Tensor) -> torch.Tensor:
        assert context.last is not None
        return self._predict(context.last[None], last[None])[0]

    def forward(self, places: Places) -> torch.Tensor:
        return self._predict(places.features[places.anchors - 1], places.last)

    def _predict(self, features: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        joined = self.join(torch.cat([features.flatten(1), last], dim=-1))
        blocks = silu(self.blocks(joined)).unflatten(-1, (self.config.num_positions, -1))
        return self.norm(joined[:, None] + blocks)


class Block(nn.Module):
    """[x_t, mask, ...] over the context. Every position predicts the token after it."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config, size = config, config.hidden_size
        self.masks = nn.Parameter(torch.zeros(config.num_positions - 1, size))
        self.join = nn.Linear(len(config.hidden_layers) * size, size, bias=False)
        self.join_norm = Norm(size, config.norm_epsilon)
        self.feed = nn.Linear(size, size, bias=False)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_layers))
        self.norm = Norm(size, config.norm_epsilon)

    def extend(self, context: Context, features: torch.Tensor) -> Context:
        length = context.length + len(features)
        rotation = self._rotation(torch.arange(context.length, length, device=features.device))
        joined = self.join_norm(self.join(features.flatten(1)))
        new = [layer.keys_and_values(joined, rotation) for layer in self.layers]  # pyright: ignore
        if context.states:
            old = context.states
            new = [
                (torch.cat([k0, k], 1), torch.cat([v0, v], 1))
                for (k0, v0), (k, v) in zip(old, new, strict=True)
            ]
        return Context(length, tuple(new), last=features[-1])

    def propose(self, context: Context, last: torch.Tensor) -> torch.Tensor:
        assert context.last is not None
        x = torch.cat([last[None], self.masks]) + self.feed(context.last[-1])
        positions = torch.arange(context.length, context.length + len(x), device=x.device)
        rotation = self._rotation(positions)
        for layer, states in zip(self.layers, context.states, strict=True):
            x = layer(x, rotation, states, None)
        return self.norm(x)

    def forward(self, places: Places) -> torch.Tensor:
        features, last, anchors = places.features, places.last, places.anchors
        size = self.config.num_positions
        x = torch.cat([last[:, None], self.masks.expand(len(last), -1, -1)], dim=1)
        x = (x + self.feed(features[anchors - 1, -1])[:, None]).flatten(0, 1)
        steps = torch.arange(size, device=x.device)
        own_positions = (places.positions[anchors, None] + steps).flatten()
        # A position attends to its own text before x_t, and to its own block.
        index = torch.arange(len(features), device=x.device)
        sees_context = (index < anchors[:, None]) & (index >= places.begins[anchors, None])
        own = torch.arange(len(anchors), device=x.device).repeat_interleave(size)
        mask = torch.cat([sees_context.repeat_interleave(size, 0), own[:, None] == own], dim=1)
        joined = self.join_norm(self.join(features.flatten(1)))
        at_context, at_places = self._rotation(places.positions), self._rotation(own_positions)
        for layer in self.layers:
            states = layer.keys_and_values(joined, at_context)  # pyright: ignore[reportCallIssue]
            x = layer(x, at_places, states, mask)
        return self.norm(x).unflatten(0, (len(anchors), size))

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin `[positions, head_dim]` of rotary positions (Su et al. 2021, arXiv
        2104.09864).
        """
        size = self.config.head_dim
        half = torch.arange(0, size, 2, device=positions.device).float() / size
        angle = positions.float()[:, None] * self.config.rope_theta**-half
        angle = torch.cat([angle, angle], dim=-1)
        return angle.cos(), angle.sin()


class BlockLayer(nn.Module):
    """Attention to context and block, then a gated feed-forward layer. Names and shapes are those
    of a Llama layer, so that a target's own layer can be the beginning.
    """

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.is_grouped = config.num_heads != config.num_key_value_heads
        size, inner = config.hidden_size, config.num_key_value_heads * config.head_dim
        self.input_layernorm = Norm(size, config.norm_epsilon)
        self.post_attention_layernorm = Norm(size, config.norm_epsilon)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(size, config.num_heads * config.head_dim, bias=False),
                "k_proj": nn.Linear(size, inner, bias=False),
                "v_proj": nn.Linear(size, inner, bias=False),
                "o_proj": nn.Linear(config.num_heads * config.head_dim, size, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(size, config.intermediate_size, bias=False),
                "up_proj": nn.Linear(size, config.intermediate_size, bias=False),
                "down_proj": nn.Linear(config.intermediate_size, size, bias=False),
            }
        )

    def keys_and_values(
        self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[heads, tokens, head_dim]` each, of normed inputs `[tokens, hidden_size]`."""
        return rotate(self._split("k_proj", x), rotation), self._split("v_proj", x)

    def _split(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.self_attn[name](x).unflatten(-1, (-1, self.head_dim)).transpose(0, 1)

    def forward(
        self,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        context: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        normed = self.input_layernorm(x)
        keys, values = self.keys_and_values(normed, rotation)
        keys, values = torch.cat([context[0], keys], dim=1), torch.cat([context[1], values], dim=1)
        queries = rotate(self._split("q_proj", normed), rotation)
        seen = scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=mask, enable_gqa=self.is_grouped
        )[0]
        x = x + self.self_attn["o_proj"](seen.transpose(0, 1).flatten(1))
        normed = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](
            silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        )


def rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Apply rotary positions to `[heads, tokens, head_dim]`."""
    left, right = x.chunk(2, dim=-1)
    cos, sin = (part.to(x.dtype) for part in rotation)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


Network = Heads | Block
"""Both have `extend` (read the hidden states `[num_new, layers, hidden_size]` of the positions that
follow a Context), `propose` (hidden vectors `[num_positions, hidden_size]` for the tokens
after the last one, whose embedding is `last` `[hidden_size]`) and `forward` (the same for many
Places at once, `[anchors, num_positions, hidden_size]`).
"""
