# SPDX-License-Identifier: Apache-2.0
"""Random tokens of an image or video, for benchmarks of token selection."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

import tokenprune
from tokenprune import Budget, Method, Pruner, Site, VisualTokens
from tokenprune.kernels.observation import Observation
from tokenprune.selection.observable_registry import compares_frames
from tokenprune.selection.segments import LayerInput, Patches, Segments
from tokenprune.selection.source import TokenSource

WIDTH, HEADS, TEXT, SHARE = {"cuda": 1024, "cpu": 256}, 8, 64, 9
FRAME_TOKENS, SCENE = 196, 16  # tokens per frame, and frames per scene
LAYERS = 32
_WITHOUT_CHOICE = ("vtw",)  # keeps all or none of an image's tokens


def selecting_methods() -> list[str]:
    """Return the names of the methods that select among visual tokens."""
    sites = (Site.PRE_LLM, Site.IN_LLM, Site.DECODE)
    names = [name for name in tokenprune.available_methods() if tokenprune.method_info(name).site in sites]
    return [name for name in names if name not in _WITHOUT_CHOICE]


def choosing(name: str) -> Method:
    """Return the method, or its first cut, which sees all tokens, if only its cuts select."""
    method = tokenprune.method(name)
    if type(method).select is not Pruner.select or type(method).score is not Pruner.score:
        return method
    return method.stages(Budget(keep=0.5), LAYERS)[0][0]


@dataclass(kw_only=True)
class MadeUp(TokenSource):
    """Source of one image of `count` tokens followed by text. Observables are computed on demand, as in an engine."""

    hidden: torch.Tensor
    attention: Any
    count: int
    needs: frozenset[str]
    input_of_layer: LayerInput | None = None

    @property
    def attention_before(self) -> Any:
        return self.attention

    @property
    def attention_after(self) -> Any:
        return self.attention

    @property
    def unrotated_attention(self) -> Any:
        return self.attention

    @property
    def input_before(self) -> LayerInput:
        assert self.input_of_layer is not None
        return self.input_of_layer

    def note(self, text: str) -> None:
        """Ignore notes of a method."""

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(hidden, hidden.shape[-1:])

    def get_last_slot(self) -> torch.Tensor:
        return torch.tensor([[self.width - 1]], device=self.hidden.device)

    def get_token_mask(self) -> torch.Tensor:
        return torch.ones(1, self.width, dtype=torch.bool, device=self.hidden.device)

    def find_text_after(self, segments: Segments) -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.arange(self.count, self.width, device=self.hidden.device)[None]
        return text, torch.ones_like(text, dtype=torch.bool)

    def get_embeddings(self, position: torch.Tensor, segments: Segments) -> torch.Tensor:
        return self.gather(self.hidden, position, segments)

    @property
    def first_layer(self) -> Any:
        width = self.hidden.shape[-1]
        project = torch.nn.Linear(width, width).to(self.hidden)
        attention = SimpleNamespace(q_proj=project, k_proj=project, head_dim=width // HEADS)
        return SimpleNamespace(input_layernorm=self.final_norm, self_attn=attention)

    def get_recorded(self, name: str) -> list[Any]:
        return [self.hidden[..., :2].float().abs()] * 2

    def read_tower(self, key: tuple, segments: Segments) -> torch.Tensor:
        if key[0] in ("encoder_keys", "encoder_queries", "encoder_features"):
            return self.attention_before.keys(self.width)[:, : self.count].float()
        heads = 3 if key[0] == "encoder_flow" else 1
        return self.attention_before.keys(self.width)[:, : self.count, :heads].float().softmax(1)

    def patches(self, segments: Segments) -> Patches:
        positions = segments.position
        frames, height, width = segments.grids[0]
        inside = positions % (height * width)
        size = [torch.full_like(positions, n) for n in (height, width, 1)]
        return Patches(positions // (height * width), inside // width, inside % width, *size, tiles=frames)


def visual_tokens(method: Method, count: int, device: torch.device) -> VisualTokens:
    """Return `count` tokens with everything that `method` may read.

    The tokens are one image of independent features. For methods that compare frames, they are a video of about `count`
    tokens, with scenes of similar frames.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    channels, video = WIDTH[device.type], compares_frames(method)
    frames = max(1, round(count / FRAME_TOKENS))
    count = frames * FRAME_TOKENS if video else count
    hidden, keys = (torch.randn(1, count + TEXT, channels, device=device, dtype=dtype) for _ in range(2))
    if video:
        scenes = torch.randn(-(-frames // SCENE), 1, FRAME_TOKENS, channels, device=device, dtype=dtype)
        hidden[0, :count] *= 0.3
        hidden[0, :count] += scenes.expand(-1, SCENE, -1, -1).reshape(-1, channels)[:count]
    by_head = keys.view(1, count + TEXT, HEADS, -1).transpose(1, 2)
    observed = Observation(by_head, by_head, None, (channels // HEADS) ** -0.5, value=by_head)
    angles = torch.arange(count + TEXT, device=device)[None, :, None] / torch.arange(1, 33, device=device)
    entered = LayerInput(keys, (angles.cos(), angles.sin()))
    source = MadeUp(hidden=hidden, attention=observed, count=count, needs=method.needs, input_of_layer=entered)
    positions = torch.arange(count, device=device)[None]
    width = 14 if video else max(w for w in range(1, math.isqrt(count) + 1) if count % w == 0)
    grid = (frames, 14, 14) if video else (1, count // width, width)
    mask, sizes = torch.ones_like(positions, dtype=torch.bool), [FRAME_TOKENS] * frames if video else [count]
    kind = "video" if video else "image"
    return VisualTokens(Segments([0], [0], [count], positions, mask, [grid], [kind], [sizes]), [count // SHARE], source)


def choice_of(name: str, count: int, device: torch.device) -> tuple[Callable[[], Any], VisualTokens]:
    """Return a function that selects among `count` tokens, and the tokens."""
    method = choosing(name)
    tokens = visual_tokens(method, count, device)

    def select() -> Any:
        source = dataclasses.replace(tokens._source)  # without cached observables
        return method.select(VisualTokens(tokens.segments, tokens.keep, source))

    return select, tokens
