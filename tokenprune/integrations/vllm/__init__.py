# SPDX-License-Identifier: Apache-2.0
"""A general plugin of vLLM: images and videos enter the language model with fewer visual tokens.

The number of tokens that a method keeps follows from an item's shape alone, so the processor (front end) can write the
shorter prompt before anything is encoded. It sends a plan with each item; the model (worker) lets the method choose
among the features of the encoder, and returns as many rows as the prompt has room for. Nothing happens on a server
that is not configured for it; see docs/serving.md. Nothing outside this package, and `gateway` above it,
imports vllm.

The path of one request, through the files that it passes:

1.  `plugin.py: register` has put our classes over vLLM's, and `settings/configure.py: configure` read the setting.
2.  `frontend/processor.py: ReducingProcessor` takes our key out of the request, and asks for what serves it.
3.  `frontend/request.py: RequestPolicy` resolves that once, into a `frontend/served.py: ServedRequest`, and checks the
    items.
4.  `frontend/pixels.py: Shrinker` makes images smaller, for methods that act on pixels.
5.  `frontend/items.py: PromptItem` makes of each item and its setting a `settings/plan.py: Plan`, by which the prompt
    is written, and which travels with the item.
6.  `frontend/metrics.py: COUNTERS` count it; `frontend/sender_cache.py: SenderCache` sends what the engine does not
    hold.
7.  `worker/models.py: ReducingModel` reads the plans of a batch, and has the vision tower run, by
    `worker/tower_treatments.py: tower_treatment`.
8.  `selection/before_llm.py: choose` lets the method choose among an item's features.
9.  `worker/rows.py: AwaitedRows` puts together the rows for the prompt.
10. `worker/positions.py: place` gives kept tokens the positions that they have in the full prompt.

Methods that act inside the language model leave the prompt as it is; for them see `in_llm`.
"""
