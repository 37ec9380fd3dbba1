# SPDX-License-Identifier: Apache-2.0
"""Experimental: drop visual tokens inside the language model, at the input of a decoder layer. See
docs/serving/start.md.

How it works. vLLM's scheduler counts the tokens of the full prompt for all layers, and so does its KV cache, unless the
server asks for memory back (`kv_cache`). But a layer looks its block table, slots and lengths up by its own name, so
the layers after the cut see fewer tokens (`layout`). Hooks on the decoder's layers let the method choose and take rows
out (`reducer`, `select`); a wrapper of the runner says what a step holds (`runner`). How many tokens an item loses
follows from its shape, so nothing has to be remembered from step to step: preemption and recomputation need no care.

With prefix caching an item loses whole blocks of the KV cache. Then every token after it keeps the slot that it has in
the full prompt, and what a block holds depends on nothing but the prompt up to the block's end and the images that
begin there, which is what its hash stands for. Packing the tokens without gaps instead would write one request's text
into blocks that others share.

Nothing here is loaded, and nothing of vLLM's runner or scheduler is changed, unless a server asks for it.
"""
