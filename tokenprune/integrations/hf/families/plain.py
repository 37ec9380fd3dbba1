# SPDX-License-Identifier: Apache-2.0
"""Adapters of families that differ from the default adapter in one or two methods."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tokenprune.integrations.hf.families.base import Adapter
from tokenprune.integrations.hf.families.registry import register_adapter
from tokenprune.integrations.hf.forward.token_state import Layout


@register_adapter("perception_lm")
class PerceptionLMAdapter(Adapter):
    """PerceptionLM. It encodes images and videos with `get_image_features`."""

    def modality(self, modality: str, arguments: dict[str, Any], call: dict[str, Any]) -> str:
        return "video" if arguments.get("pixel_values") is call.get("pixel_values_videos") else modality


@register_adapter("idefics3", "smolvlm")
class Idefics3Adapter(Adapter):
    """Idefics3 and SmolVLM. Each tile of an image is a separate run of placeholders.

    The processor writes an image as:

        <fake> <row_1_col_1> image... <fake> <row_1_col_2> image... \\n
        <fake> <row_2_col_1> image... <fake> <row_2_col_2> image... \\n \\n
        <fake> <global-img> image... <fake>

    The global view is last, followed by a closing <fake>. The config has only the id of `image`, so <fake> is
    identified as the token two before each run.
    """

    def runs_per_image(self, ids: list[int], runs: list[tuple[int, int]]) -> list[int]:
        """Return the number of tiles of each image, including the global view.

        Tiles of an image without a closing <fake> (a handwritten or truncated prompt) count as one image each.
        """
        images: list[int] = []
        tiles, fake = 0, None  # number of tiles and <fake> token of the current image
        for index, (first, last) in enumerate(runs):
            opener = ids[first - 2] if first >= 2 else None
            # Up to two newlines precede the <fake> of a tile.
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
    """GLM-4.1V and its variants, and Molmo 2. Their video frames have the placeholder id of images.

    A batch has either images or videos.
    """

    def visual_mask(self, call: dict[str, Any]) -> dict[str, Tensor]:
        mask = super().visual_mask(call)
        images, others = mask["image"], mask["video"] & ~mask["image"]  # Molmo 2 has the same id for both
        encoded = call.get("mm_encoder_outputs") or {}
        if encoded.get("video") is None and call.get("pixel_values_videos") is None:
            return {"image": images, "video": others}
        return {"image": others, "video": images}


@register_adapter("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe_thinker", "cosmos3_omni", "cohere_compass")
class DeepstackAdapter(Adapter):
    """Qwen3-VL and its variants. They add features of several tower layers to visual tokens after decoder layers.

    The decoder adds the features at a mask of its input tokens. If all cuts are at the entry, it gets the mask and the
    features of the kept tokens. With cuts inside the decoder, this adapter adds the features after each layer, with the
    decoder's function.
    """

    extra_arguments = frozenset({"visual_pos_masks"})
    adds_after_layers = True

    def take_extras(self, kwargs: dict[str, Any], layout: Layout) -> Any:
        mask, features = kwargs.pop("visual_pos_masks", None), kwargs.pop("deepstack_visual_embeds", None)
        if mask is None or not features:
            return None
        # One dense [B, W, D] tensor per layer with zeros at text, to be cut and merged like the hidden states.
        dense = []
        for feature in features:
            zeros = feature.new_zeros(*mask.shape, feature.shape[-1])
            dense.append(zeros.masked_scatter(mask.unsqueeze(-1).to(zeros.device), feature))
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
