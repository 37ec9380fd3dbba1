# SPDX-License-Identifier: Apache-2.0
"""A general plugin of vLLM that prunes or merges visual tokens of images and videos.

The number of tokens that a method keeps depends only on an item's shape, so the processor (front end) can write the
shorter prompt before encoding. It sends a plan with each item. The model (worker) lets the method select among the
encoder's features, and returns the number of rows that the prompt expects. A server without a setting behaves as
before; see docs/serving/start.md. No module outside of this package imports vllm.

The path of a request through the files:

1.  `plugin.py: register` replaced vLLM's classes by ours, and `settings/configure.py: configure` read the setting.
2.  `frontend/processor.py: ReducingProcessor` removes our key from the request.
3.  `frontend/request.py: RequestPolicy` resolves it into a `frontend/served.py: ServedRequest` and checks the items.
4.  `frontend/pixels.py: Shrinker` resizes images, for methods that act on pixels.
5.  `frontend/items.py: PromptItem` turns each item and its setting into a `settings/plan.py: Plan`. The prompt is
    written from the plan, and the plan is sent with the item.
6.  `frontend/metrics.py: COUNTERS` counts it; `frontend/sender_cache.py: SenderCache` sends missing items.
7.  `worker/models.py: ReducingModel` reads the plans of a batch and runs the vision tower through
    `worker/tower_treatments.py: create_tower_treatment`.
8.  `selection/before_llm.py: choose` calls the method on the features of an item.
9.  `worker/rows.py: AwaitedRows` assembles the rows for the prompt.
10. `worker/positions.py: write_positions` gives kept tokens their positions in the full prompt.

Methods that act inside the language model do not change the prompt; see `in_llm`.
"""
