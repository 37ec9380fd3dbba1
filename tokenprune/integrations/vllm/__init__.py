# SPDX-License-Identifier: Apache-2.0
"""A general plugin of vLLM: images and videos enter the language model with fewer visual tokens.

The number of tokens that a method keeps follows from an item's shape alone, so the processor (front end) can write the
shorter prompt before anything is encoded. It sends a plan with each item; the model (worker) lets the method choose
among the features of the encoder, and returns as many rows as the prompt has room for. Nothing happens on a server
that is not configured for it; see docs/serving/start.md. Nothing outside this package, and `gateway` above it,
imports vllm.

The path of one request, through the files that it passes:

1.  `plugin.py: register` replaced vLLM's classes by ours, and `settings/configure.py: configure` read the setting.
2.  `frontend/processor.py: ReducingProcessor` takes our key out of the request.
3.  `frontend/request.py: RequestPolicy` resolves it into a `frontend/served.py: ServedRequest` and checks the items.
4.  `frontend/pixels.py: Shrinker` resizes images, for methods that act on pixels.
5.  `frontend/items.py: PromptItem` turns each item and its setting into a `settings/plan.py: Plan`. The prompt is
    written from the plan, and the plan travels with the item.
6.  `frontend/metrics.py: COUNTERS` counts it; `frontend/sender_cache.py: SenderCache` sends missing items.
7.  `worker/models.py: ReducingModel` reads the plans of a batch and runs the vision tower through
    `worker/tower_treatments.py: tower_treatment`.
8.  `selection/before_llm.py: choose` calls the method on the features of an item.
9.  `worker/rows.py: AwaitedRows` assembles the rows for the prompt.
10. `worker/positions.py: place` gives kept tokens their positions in the full prompt.

Methods that act inside the language model leave the prompt as it is; for them see `in_llm`.
"""
