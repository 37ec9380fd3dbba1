# SPDX-License-Identifier: Apache-2.0
"""Keys of a setting that are not options of its method."""

IN_LLM = "experimental_in_llm"  # vLLM only: run the method inside the language model
LIMIT = "max_visual_tokens"
SCOPE = ("method", "keep", "per", "off", IN_LLM, LIMIT)
