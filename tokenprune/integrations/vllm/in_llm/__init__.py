# SPDX-License-Identifier: Apache-2.0
"""Experimental: drop visual tokens inside the language model, at the input of a decoder layer. See
docs/serving/reference.md.

vLLM's scheduler and KV cache count the tokens of the unpruned prompt for all layers, unless the server frees the KV
cache of dropped tokens (`kv_cache`). But each layer looks up its block table, slots and lengths by its name, so layers
after the cut can process fewer tokens (`layout`). Hooks on the decoder's layers run the method and drop rows
(`reducer`). A wrapper of the runner describes each step (`runner`). The number of dropped tokens of an item depends
only on its shape. No state is carried from step to step, so preemption and recomputation need no special handling.

With prefix caching an item loses complete blocks of the KV cache. Each later token then keeps the slot that it has in
the unpruned prompt, and the content of a block depends only on the prompt up to the end of the block and on the images
that begin there. This is what the hash of a block assumes. Packing the tokens without gaps would write the text of one
request into blocks that other requests share.

This package is imported, and vLLM's runner and scheduler are changed, only if the server's setting enables it.
"""
