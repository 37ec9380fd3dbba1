# SPDX-License-Identifier: Apache-2.0
"""Models of lmms-eval that can be patched: they generate with a supported model of transformers.

docs/measure/lmms-eval.md has them as a table. tests/lmms/test_bases.py runs the tested models and compares the table.
"""

from __future__ import annotations

TESTED = {
    "gemma3": "Gemma 3",
    "idefics2": "Idefics2",
    "internvl_hf": "InternVL 3 and 3.5",
    "lfm2_5_vl": "LFM2-VL",
    "llava_hf": "LLaVA-1.5, LLaVA-NeXT, LLaVA-OneVision",
    "mistral3_vl": "Mistral 3",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen2_vl": "Qwen2-VL",
    "qwen3_5": "Qwen3.5",
    "qwen3_vl": "Qwen3-VL",
}
# Wrap a supported model type, but are not run by the tests. Loading one logs a warning.
UNTESTED = {
    "aria": "Aria",
    "fuyu": "Fuyu",
    "gemma4": "Gemma 4",
    "glm4v": "GLM-4.1V and later",
    "instructblip": "InstructBLIP",
    "llama4_scout": "Llama 4",
    "video_llava": "Video-LLaVA",
}
BASES = TESTED | UNTESTED
