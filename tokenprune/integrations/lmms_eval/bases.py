# SPDX-License-Identifier: Apache-2.0
"""Which of lmms-eval's own models can be patched: those that generate with a model of transformers that we support.

tests_lmms/test_bases.py runs each of them; docs/lmms-eval.md has them as a table.
"""

from __future__ import annotations

BASES = {
    "llava_hf": "LLaVA-1.5, LLaVA-NeXT, LLaVA-OneVision",
    "qwen2_vl": "Qwen2-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "internvl_hf": "InternVL 3 and 3.5",
    "gemma3": "Gemma 3",
    "mistral3_vl": "Mistral 3",
    "huggingface": "any with a processor that has a chat template",
}
