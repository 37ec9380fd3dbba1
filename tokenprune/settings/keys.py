# SPDX-License-Identifier: Apache-2.0
"""Keys of a setting that are not options of its method."""

IN_LLM = "experimental_in_llm"  # how vLLM serves a method; it changes nothing elsewhere
LIMIT = "max_visual_tokens"  # an argument of patch()
SCOPE = ("method", "keep", "per", "off", IN_LLM)
