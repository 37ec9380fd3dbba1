# SPDX-License-Identifier: Apache-2.0
"""Families of the common contract: placeholders, `masked_scatter`, `language_model(inputs_embeds=...)`."""

from __future__ import annotations

from zoo import TEXT, Family, llava_picture, tower


def _families() -> list[Family]:
    clip = tower("clip_vision_model", 24, projection_dim=32)
    llama = {**TEXT, "model_type": "llama"}
    return [
        Family(
            "vipllava",
            dict(text_config=llama, vision_config=clip, vision_feature_layers=[-1, -2, 1]),
            llava_picture,
            (24,),
        ),
    ]


FAMILIES: dict[str, Family] = {family.name: family for family in _families()}
NOT_BUILT: dict[str, str] = {}
