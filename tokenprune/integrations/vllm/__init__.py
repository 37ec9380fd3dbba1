# SPDX-License-Identifier: Apache-2.0
"""A general plugin of vLLM: images and videos enter the language model with fewer visual tokens.

`plugin.register` is the entry point (`vllm.general_plugins`). It does nothing to a server that is not configured for
it; see docs/serving.md. Nothing outside this package, and `tokenprune.serve` above it, imports vllm.

How it works. The number of tokens that a method keeps follows from an item's shape alone, so the processor (front end)
can write the shorter prompt before anything is encoded. It attaches a `Plan` to each item; the model (worker) reads
it, lets the method choose among the features of the encoder, and returns as many rows as the prompt has room for.
Methods that act on pixels shrink images in the processor, and leave the counting to vLLM. What serves a request is
resolved once, by the policy of its server (front/request.py).
"""
