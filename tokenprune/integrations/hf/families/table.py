# SPDX-License-Identifier: Apache-2.0
"""What is known of each model type: one table for the engine, `tokenprune families` and docs/families.md.

A model type in `SUPPORTED` has a tiny model in the test suite, on which cutting computes what masking computes. One in
`REFUSED` is turned away with the reason. Any other is tried with the common contract (`base.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

OLDEST = "5.0"  # of transformers; pyproject.toml has the same


@dataclass(frozen=True)
class Support:
    """sites: names of `Site`, in the order in which data meets them. note: what a user should know. since: the first
    version of transformers with which the model type can be pruned."""

    sites: tuple[str, ...] = ("PRE_LLM", "IN_LLM", "DECODE")
    note: str = ""
    since: str = OLDEST


_INSIDE = ("PRE_LLM", "IN_LLM", "DECODE")
_TOWER = ("IN_ENCODER", *_INSIDE)
_MERGING = ("PRE_ENCODER", "IN_ENCODER", *_INSIDE)
_ALL = ("PRE_ENCODER", "IN_ENCODER", "PRE_LLM", "ATTENTION", "IN_LLM", "DECODE")

_TILES = "tiles of an image share its budget; where the prompt comes as embeddings, each counts as an image"

# The families on which every method is tested.
_EVERY_METHOD = {
    "llava": Support(_MERGING),
    "llava_next": Support(_MERGING),
    "llava_onevision": Support(_ALL),
    "qwen2_vl": Support(_ALL),
    "qwen2_5_vl": Support(_ALL),
    "qwen3_vl": Support(_ALL, "deepstack features are cut and merged with the tokens"),
    "internvl": Support(_MERGING),
    "smolvlm": Support(_MERGING, _TILES),
    "idefics3": Support(_MERGING, _TILES),
    "gemma3": Support(_MERGING, "kept tokens of an image go on seeing each other both ways"),
}

# Families of the common contract.
_FRAMES_AS_IMAGES = Support(note="frames of a video carry the id of images; a batch holds images or videos, not both")
_PLAIN: dict[str, Support] = {
    "aria": Support(note="queries of a resampler: no grid"),
    "aya_vision": Support(_TOWER),
    "cohere2_vision": Support(_TOWER),
    "deepseek_ocr2": Support(note="crops, whole image and separator make one run; queries: no grid", since="5.10"),
    "deepseek_vl": Support(),
    "deepseek_vl_hybrid": Support(),
    "fast_vlm": Support(),
    "fuyu": Support(note="no vision tower; ids at the ends of rows are text and stay"),
    "glm46v": _FRAMES_AS_IMAGES,
    "glm4v": _FRAMES_AS_IMAGES,
    "glm4v_moe": _FRAMES_AS_IMAGES,
    "glm_ocr": replace(_FRAMES_AS_IMAGES, since="5.1"),
    "glmga": replace(_FRAMES_AS_IMAGES, since="5.10"),
    "got_ocr2": Support(),
    "hunyuan_vl": Support(note="features for begin, end and ends of rows may go like any other", since="5.13"),
    "idefics2": Support(note="queries of a resampler: no grid"),
    "janus": Support(note="reading images, not drawing them"),
    "lighton_ocr": Support(),
    "llava_next_video": Support(),
    "mistral3": Support(note="ids at the ends of rows are text and stay"),
    "ovis2": Support(note="each tile counts as an image; indicator ids are text and stay"),
    "paddleocr_vl": Support(),
    "paligemma": Support(_TOWER, "kept tokens of the prefix go on seeing each other both ways"),
    "perception_lm": Support(),
    "pp_chart2table": Support(since="5.4"),
    "qianfan_ocr": Support(_TOWER, since="5.6"),
    "qwen2_5_omni_thinker": Support(note="audio stays; for the whole model, patch its `thinker`", since="5.6"),
    "qwen3_vl_moe": Support(_TOWER, "deepstack features are cut and merged with the tokens"),
    "shieldgemma2": Support(note="kept tokens of an image go on seeing each other both ways"),
    "video_llama_3": Support(
        note="each frame of a video counts as an image; what did not move is gone already: no grid"
    ),
    "video_llava": Support(),
    "vipllava": Support(),
}

# Families that hand their decoder more than the common contract.
_STATEFUL = Support(
    ("PRE_LLM", "IN_LLM"),
    "layers with a state build it from the kept tokens alone; scores come from a layer that attends",
)
_SHARED = "the last layers attend to keys of earlier ones: the last cut is made at the input of those"
_QUERIES = Support(note="with OPT or Vicuna, not with T5; queries of a Q-Former: no grid")
_SPECIAL: dict[str, Support] = {
    "qwen3_5": Support(("IN_ENCODER", *_STATEFUL.sites), _STATEFUL.note, since="5.13"),
    "qwen3_5_moe": Support(("IN_ENCODER", *_STATEFUL.sites), _STATEFUL.note, since="5.13"),
    "gemma4": Support(note=_SHARED, since="5.5"),
    "llama4": Support(note="each tile counts as an image; windows and chunks are measured in the full prompt"),
    "lfm2_vl": replace(_STATEFUL, since="5.13"),
    "lfm3_vl": replace(_STATEFUL, since="5.23"),
    "ernie4_5_vl_moe": Support(),
    "gemma3n": Support(note=_SHARED),
    "gemma4_unified": Support(since="5.10"),
    "granite4_vision": Support(note="features of several depths are cut and merged with the tokens", since="5.8"),
    "kimi_k25": Support(since="5.13"),
    "qwen3_omni_moe_thinker": Support(note="deepstack features are cut and merged with the tokens", since="5.6"),
    "exaone4_5": Support(since="5.8"),
    "emu3": Support(note="images are ids of the vocabulary: tokens that look alike are equal"),
    "chameleon": Support(note="images are ids of the vocabulary: tokens that look alike are equal"),
    "muse_glimmer": Support(since="5.15"),
    "muse_spark": Support(since="5.20"),
    "step3p7": Support(note="crops come before the whole view in one run: no grid", since="5.16"),
    "minicpm_ocr": replace(_STATEFUL, since="5.21"),
    "minicpmv4_6": replace(_STATEFUL, since="5.13"),
    "minicpmv4_7": replace(_STATEFUL, since="5.18"),
    "nemotron_h_omni": replace(_STATEFUL, since="5.18"),
    "cosmos3_omni": Support(note="deepstack features are cut and merged with the tokens", since="5.11"),
    "cosmos3_edge": Support(since="5.15"),
    "cohere_compass": Support(note="deepstack features are cut and merged with the tokens", since="5.16"),
    "hyperclovax_vision_v2": Support(since="5.18"),
    "blip-2": _QUERIES,
    "instructblip": _QUERIES,
    "instructblipvideo": _QUERIES,
}

SUPPORTED: dict[str, Support] = {**_EVERY_METHOD, **_PLAIN, **_SPECIAL}

# Model types that cannot work: cutting would be without meaning, or silently wrong.
_REASONS = {
    "its images enter through cross-attention, not through the sequence: no layer but those would get faster, and "
    "their keys are not of the prompt": "mllama idefics evolla blip",
    "its images are in an encoder that the decoder reads by cross-attention": (
        "florence2 t5gemma2 udop pix2struct pp_formulanet vision-encoder-decoder"
    ),
    "it puts its images before the text inside its own layers, without placeholders in the prompt": "git",
    "its decoder takes images by places of its own and counts positions itself, and generate() calls it past the "
    "model's own forward": "kosmos-2 kosmos-2.5",
    "some of its layers choose for themselves which blocks of keys they look at, by slots of the cache: with tokens "
    "gone the blocks would hold others": "minimax_m3_vl qwen4_exp glm5_next",
    "its attention measures distances between slots, and every layer convolves neighbours": "inkling_mm_model inkling2",
    "an indexer of its own chooses which keys its layers look at, by keys that the cache holds beside the others: a "
    "cut would not reach those": "mistral_large4 dots3_note",
    "its cache keeps the keys of as many tokens as the prompt had when it came, and a window of the others: with "
    "tokens gone it would take the first ones of the answer for the prompt": "unlimited_ocr",
    "it writes blocks of text by diffusion, and does not keep what it read of the prompt": "diffusion_gemma",
    "no test covers it yet: its features are added to the embeddings of placeholders that its config names in its own "
    "way": "molmo2",
    "no test covers it yet: a router decides how many tokens each of its tiles has, and features of several depths are "
    "added inside its decoder": "granite_docling",
    "it is a policy for robots, whose actions read the keys of the whole prefix": "pi0",
    "it takes no images in transformers, text alone": "mistral4",
    "it is the vision tower of other models, which have a type of their own (llava, mistral3)": "pixtral",
}
REFUSED = {family: reason for reason, families in _REASONS.items() for family in families.split()}

# Families whose patches can merge in the tower. They hand the decoder one feature for each patch, at most newlines
# between; or one for each unit of patches: those that stand together in a packed tower (tower/packed_merging.py), or a
# square of a tower's grid (pixel shuffle, pooling), of which `PatchSource.unit_side` knows the side.
MERGEABLE = set(
    "llava llava_next llava_onevision paligemma qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe internvl "
    "qianfan_ocr idefics3 smolvlm gemma3 aya_vision cohere2_vision".split()
)

# Families of whose videos it is tested which tokens are a frame. In video_llama_3 each frame counts as an image, with
# as many tokens as moved.
VIDEO_FRAMES = set(
    "llava_onevision qwen2_vl qwen2_5_vl qwen3_vl llava_next_video video_llava perception_lm qwen3_vl_moe "
    "qwen2_5_omni_thinker glm4v glm46v glm4v_moe glmga glm_ocr qwen3_5 qwen3_5_moe qwen3_omni_moe_thinker exaone4_5 "
    "hyperclovax_vision_v2 cosmos3_omni cosmos3_edge muse_glimmer muse_spark lfm3_vl ernie4_5_vl_moe".split()
)

# Families whose every image (a tile, where each counts as one) is a square of tokens without newlines between; and
# those that put several such squares into one run of placeholders, where `image_seq_length` tokens are one square. Of
# others, a number of tokens that happens to be a square says nothing.
SQUARE = set(
    "llava vipllava video_llava gemma3 shieldgemma2 paligemma deepseek_vl deepseek_vl_hybrid janus fast_vlm chameleon "
    "idefics3 smolvlm llama4 ovis2".split()
)
SQUARE_TILES = {"internvl", "got_ocr2", "pp_chart2table", "qianfan_ocr"}

# Families whose towers pack the patches of all images into one sequence, in which those of a visual token stand
# together to the end of the tower, so that whole tokens can leave ahead of it (tower/unit_dropping.py).
PACKED_PATCHES = set(
    "qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe qwen2_5_omni_thinker qwen3_omni_moe_thinker "
    "glm4v glm46v glm4v_moe glm_ocr glmga exaone4_5 hyperclovax_vision_v2 cohere_compass cosmos3_omni".split()
)

# Families whose encoder takes every image (or tile, or video) for itself, by rows of its arguments, so that encoded
# ones can be used again one by one (tower/reuse.py). Elsewhere a call of the encoder is used again as a whole.
IMAGES_APART = set("llava llava_next llava_onevision qwen2_vl qwen2_5_vl qwen3_vl internvl gemma3".split())
