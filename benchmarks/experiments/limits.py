# SPDX-License-Identifier: Apache-2.0
"""Compute the vision tower's share of a prefill and the maximum speedup by pruning, for well-known models.

    python benchmarks/experiments/limits.py           # print the table
    python benchmarks/experiments/limits.py --page    # write it into docs/results/speed.md

The closed forms use the sizes of the published configs below, without weights or a hub. Each prompt has one image and
64 text tokens. `tokenprune profile --config-only` prints the same for any model.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
from common import fill_page
from transformers import CONFIG_MAPPING

from tokenprune.settings.cost import CostModel, Load, compute_site_limits

PAGE = Path(__file__).parents[2] / "docs/results/speed.md"
BEGIN, END = "<!-- limits:begin (benchmarks/experiments/limits.py --page) -->", "<!-- limits:end -->"
KEEP = 0.25

_CLIP = dict(
    model_type="clip_vision_model", hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
    num_attention_heads=16, image_size=336, patch_size=14,
)  # fmt: skip
_SIGLIP = dict(
    model_type="siglip_vision_model", hidden_size=1152, intermediate_size=4304, num_hidden_layers=27,
    num_attention_heads=16, image_size=896, patch_size=14, vision_use_head=False,
)  # fmt: skip
_VICUNA = dict(
    model_type="llama", hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=32, vocab_size=32064,
)  # fmt: skip
_QWEN2_7B = dict(
    hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
    vocab_size=152064,
)  # fmt: skip
_QWEN2_3B = dict(
    hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=2,
    vocab_size=151936,
)  # fmt: skip
_QWEN2_1B = dict(
    hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
    vocab_size=151674,
)  # fmt: skip
_INTERN = dict(
    hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, image_size=[448, 448],
    patch_size=[14, 14],
)  # fmt: skip
_QWEN25_TOWER = dict(
    depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, patch_size=14, window_size=112,
    fullatt_block_indexes=[7, 15, 23, 31], hidden_act="silu",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A published model. `tokens` and `tiles` describe its image, as in `Load.from_config`."""

    label: str
    family: str
    config: dict[str, Any]
    tokens: int | None = None
    tiles: int | None = None

    def build_config(self) -> Any:
        return CONFIG_MAPPING[self.family](**self.config)


SHAPES = (
    Shape("LLaVA-1.5-7B", "llava", dict(vision_config=_CLIP, text_config=_VICUNA)),
    Shape("LLaVA-NeXT-7B, 5 views", "llava_next", dict(vision_config=_CLIP, text_config=_VICUNA), tiles=5),
    *(
        Shape(
            f"InternVL3-{size}, 7 tiles", "internvl",
            dict(vision_config=_INTERN, text_config=dict(model_type="qwen2", **text), downsample_ratio=0.5), tiles=7,
        )
        for size, text in (("8B", _QWEN2_7B), ("2B", _QWEN2_1B))
    ),
    Shape(
        "Qwen2.5-VL-7B, 1024 tokens", "qwen2_5_vl",
        dict(vision_config={**_QWEN25_TOWER, "out_hidden_size": 3584}, text_config=_QWEN2_7B), tokens=1024,
    ),
    Shape(
        "Qwen3-VL-8B, 1024 tokens",
        "qwen3_vl",
        dict(
            vision_config=dict(
                depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16, patch_size=16, out_hidden_size=4096,
                deepstack_visual_indexes=[8, 16, 24],
            ),
            text_config=dict(
                hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
                num_key_value_heads=8, head_dim=128, vocab_size=151936,
            ),
        ),
        tokens=1024,
    ),
    Shape(
        "Qwen2.5-VL-3B, 1024 tokens", "qwen2_5_vl",
        dict(vision_config={**_QWEN25_TOWER, "out_hidden_size": 2048}, text_config=_QWEN2_3B), tokens=1024,
    ),
    Shape(
        "Gemma3-4B", "gemma3",
        dict(
            vision_config=_SIGLIP,
            text_config=dict(
                hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, num_attention_heads=8,
                num_key_value_heads=4, head_dim=256, vocab_size=262208,
            ),
            mm_tokens_per_image=256,
        ),
    ),
    Shape(
        "SmolVLM-500M, 17 tiles", "smolvlm",
        dict(
            vision_config=dict(
                hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, image_size=512,
                patch_size=16,
            ),
            text_config=dict(
                model_type="llama", hidden_size=960, intermediate_size=2560, num_hidden_layers=32,
                num_attention_heads=15, num_key_value_heads=5, head_dim=64, vocab_size=49280,
            ),
            scale_factor=4,
        ),
        tiles=17,
    ),
)  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """Return each shape's load, its tower share, and the limits of the sites."""
    rows = []
    for shape in SHAPES:
        config = shape.build_config()
        model, load = CostModel.from_config(config), Load.from_config(config, tokens=shape.tokens, tiles=shape.tiles)
        cost = model.compute_cost(load)
        rows.append(
            {
                "model": shape.label,
                "visual": load.visual,
                "tower": cost.tower_share,
                "time": cost.tower_time,
                "decoder_free": cost.flops / cost.tower,
                "sites": {limit.site: (limit.at_keep, limit.limit) for limit in compute_site_limits(model, load, KEEP)},
            }
        )
    return rows


def table() -> str:
    keep = f"{100 * KEEP:.0f} %"
    lines = [
        f"| model shape | visual tokens | tower | of a GPU's time | before the LLM: {keep} | decoder free "
        f"| in the LLM: {keep} | in the tower: {keep} | smaller images: {keep} |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows():
        before, inside, tower, pixels = (
            row["sites"][site][0] for site in ("PRE_LLM", "IN_LLM", "IN_ENCODER", "PRE_ENCODER")
        )
        lines.append(
            f"| {row['model']} | {row['visual']} | {row['tower']:.0%} | {row['time']:.0%} | x{before:.2f} "
            f"| x{row['decoder_free']:.1f} "
            f"| x{inside:.2f} | x{tower:.2f} | x{pixels:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the table into docs/results/speed.md")
    if not parser.parse_args().page:
        print(table())
        return
    fill_page(PAGE, BEGIN, END, table())


if __name__ == "__main__":
    main()
