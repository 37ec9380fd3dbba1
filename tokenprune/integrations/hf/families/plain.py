# SPDX-License-Identifier: Apache-2.0
"""Families of the common contract, and what little sets them apart."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tokenprune.integrations.hf.families.base import Adapter, register_adapter
from tokenprune.integrations.hf.forward.token_state import Layout


@register_adapter("perception_lm")
class PerceptionLMAdapter(Adapter):
    """PerceptionLM encodes its videos by `get_image_features`, too."""

    def modality(self, modality: str, arguments: dict[str, Any], call: dict[str, Any]) -> str:
        return "video" if arguments.get("pixel_values") is call.get("pixel_values_videos") else modality


@register_adapter("idefics3", "smolvlm")
class Idefics3Adapter(Adapter):
    """Idefics3 and SmolVLM: the tiles of an image are separate runs of placeholders, and the prompt of the processor
    says which belong together:

        <fake> <row_1_col_1> image... <fake> <row_1_col_2> image... \\n
        <fake> <row_2_col_1> image... <fake> <row_2_col_2> image... \\n \\n
        <fake> <global-img> image... <fake>

    The whole view comes last, and <fake> closes it. The model's config has the id of `image` alone; <fake> is known by
    its place, two before each run.
    """

    def runs_per_image(self, ids: list[int], runs: list[tuple[int, int]]) -> list[int]:
        """Return the number of tiles, the whole view among them, of each image. Tiles whose image is not closed as
        the processor closes it (a prompt written by hand, or cut) count as an image each."""
        images: list[int] = []
        tiles, fake = 0, None  # of the image that is open
        for index, (first, last) in enumerate(runs):
            opener = ids[first - 2] if first >= 2 else None
            # Up to two newlines stand before what opens a tile.
            if tiles and (opener != fake or first - runs[index - 1][1] > 4):
                images, tiles = images + [1] * tiles, 0
            fake, tiles = opener, tiles + 1
            follows = ids[last] if last < len(ids) else None
            opens_next = index + 1 < len(runs) and runs[index + 1][0] == last + 2
            if fake is not None and follows == fake and not opens_next:
                images, tiles = [*images, tiles], 0
        return images + [1] * tiles


@register_adapter("glm4v", "glm46v", "glm4v_moe", "glm_ocr", "glmga", "molmo2")
class FramesAsImages(Adapter):
    """GLM-4.1V and its kin, and Molmo 2, mark the frames of a video with the id of images. A batch holds the one or the
    other."""

    def visual_mask(self, call: dict[str, Any]) -> dict[str, Tensor]:
        mask = super().visual_mask(call)
        images, others = mask["image"], mask["video"] & ~mask["image"]  # the two ids of Molmo 2 are one
        encoded = call.get("mm_encoder_outputs") or {}
        if encoded.get("video") is None and call.get("pixel_values_videos") is None:
            return {"image": images, "video": others}
        return {"image": others, "video": images}


@register_adapter("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker", "cosmos3_omni", "cohere_compass")
class DeepstackAdapter(Adapter):
    """Qwen3-VL and its kin add features of several tower layers to the visual tokens after the first decoder layers.

    The decoder adds them by a mask of its input. If tokens leave at its entry only, it gets a shorter mask and fewer
    features. If tokens leave inside the decoder, this adapter adds the features after each layer, by the same function.
    """

    extra_arguments = frozenset({"visual_pos_masks"})
    adds_after_layers = True

    def take_extras(self, kwargs: dict[str, Any], layout: Layout) -> Any:
        mask, features = kwargs.pop("visual_pos_masks", None), kwargs.pop("deepstack_visual_embeds", None)
        if mask is None or not features:
            return None
        # One dense [B, W, D] tensor a layer, zeros at text: it can be cut and merged like the hidden states.
        dense = []
        for feature in features:
            full = feature.new_zeros(*mask.shape, feature.shape[-1])
            dense.append(full.masked_scatter(mask.unsqueeze(-1).to(full.device), feature))
        return mask, dense

    def cut_extras(self, extras: Any, slots: Tensor, layout: Layout, merge: Any) -> Any:
        if extras is None:
            return None
        mask, dense = extras
        mask = mask.gather(1, slots)
        if layout.valid is not None:
            mask = mask & layout.valid
        if merge is not None:
            dense = [merge(feature) for feature in dense]
        index = slots.unsqueeze(-1)
        return mask, [feature.gather(1, index.expand(-1, -1, feature.shape[-1])) for feature in dense]

    def return_extras(self, extras: Any) -> dict[str, Any]:
        mask, dense = extras
        return {"visual_pos_masks": mask, "deepstack_visual_embeds": [feature[mask] for feature in dense]}

    def after_layer(self, extras: Any, layer: int, hidden: Tensor) -> Tensor:
        if extras is None or layer >= len(extras[1]):
            return hidden
        mask, dense = extras
        return self.decoder._deepstack_process(hidden, mask, dense[layer][mask])
