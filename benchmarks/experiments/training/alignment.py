# SPDX-License-Identifier: Apache-2.0
"""Stage 2: train the projector to map each patch to the embeddings of the words that describe it.

The embedding table is shared with the language model's output layer. After this short stage, a question's noun is
similar to the patches that show it, and a patch is similar to the words of its answers. The language model starts its
training from there instead of from two unrelated spaces.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from demo_model import GRID, ID
from targets import HEADS, SHAPES
from tokenprune_demo.scenes import COLORS, LARGE, POSITIONS, WORDS

NAMES = list(HEADS)
THING = [ID["picture"], *(ID[k] for k in SHAPES), ID["digit"], ID["sign"]]
PLURAL = [ID[f"{k}s"] for k in LARGE]


@torch.no_grad()
def prepare(model, pixels: torch.Tensor) -> None:
    """Scale the initial weights: normalized projector inputs, larger embeddings, smaller block outputs."""
    features = model.model.vision_tower(pixels).last_hidden_state[:, 1:].flatten(0, 1)
    mean, std = features.mean(0), features.std(0)
    first, second = model.model.multi_modal_projector.linear_1, model.model.multi_modal_projector.linear_2
    torch.nn.init.normal_(first.weight, std=features.shape[1] ** -0.5)
    first.weight /= std
    first.bias.copy_(-first.weight @ mean)
    torch.nn.init.normal_(second.weight, std=0.2 * first.out_features**-0.5)
    language = model.model.language_model
    language.embed_tokens.weight *= 2
    for layer in language.layers:
        layer.self_attn.o_proj.weight *= 0.3
        layer.mlp.down_proj.weight *= 0.3


def word_loss(model, hidden: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the cross-entropy of each patch with the words of its groups, and the accuracy of each group."""
    projected = model.model.multi_modal_projector(hidden[:, 1:]).flatten(0, 1)
    logits = F.rms_norm(projected, projected.shape[-1:]) @ model.model.language_model.embed_tokens.weight.T
    label = {name: labels[:, i].flatten() for i, name in enumerate(NAMES)}
    cell = torch.arange(GRID * GRID).repeat(len(hidden))
    low, right = cell // GRID >= GRID // 2, cell % GRID >= GRID // 2
    large = (label["thing"] > 0) & (label["thing"] <= len(LARGE))
    groups = {
        "thing": (THING, label["thing"], label["thing"] > 0),
        "nothing": (THING, label["thing"], label["thing"] == 0),
        "plural": (PLURAL, label["thing"] - 1, large),
        "colour": ([ID[c] for c in COLORS], label["colour"] - 1, label["colour"] > 0),
        "digit": ([ID[str(d)] for d in range(10)], label["digit"], label["digit"] >= 0),
        "word": ([ID[w] for w in WORDS], label["word"], label["word"] >= 0),
        "quadrant": ([ID[p] for p in POSITIONS], 2 * low.long() + right.long(), cell >= 0),
        "side": ([ID["left"], ID["right"]], right.long(), cell >= 0),
        "height": ([ID["upper"], ID["lower"]], low.long(), cell >= 0),
    }
    total, accuracy = 0.0, {}
    for name, (tokens, target, is_labeled) in groups.items():
        if is_labeled.any():
            part, aim = logits[is_labeled][:, tokens], target[is_labeled]
            total = total + F.cross_entropy(part, aim) * (0.5 if name in ("side", "height", "nothing") else 1.0)
            accuracy[name] = (part.argmax(-1) == aim).float().mean().item()
    return total, accuracy


@torch.no_grad()
def amplify_side_words(model, factor: float) -> None:
    """Amplify the side words (left, right, upper, lower) in the last head of the first layer.

    Scales the head's output by ``factor`` within the span of the differences between the four words' values. The rest
    of the output does not change.
    """
    layer, words = model.model.language_model.layers[0], [ID[w] for w in ("left", "right", "upper", "lower")]
    width = layer.self_attn.head_dim
    embedded = layer.input_layernorm(model.model.language_model.embed_tokens.weight[words])
    values = layer.self_attn.v_proj(embedded)[:, -width:]
    basis = torch.linalg.svd(values - values.mean(0), full_matrices=False)[2][:3]
    output = layer.self_attn.o_proj.weight
    output[:, -width:] += (factor - 1) * output[:, -width:] @ basis.T @ basis
