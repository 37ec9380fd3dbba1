# SPDX-License-Identifier: Apache-2.0
"""Keys of a vLLM server's setting beside the reduction: profiles, callers, load, limits, rollouts, budgets by age.

`tokenprune.integrations.vllm` reduces images under one setting. This package stands behind its seam, `RequestPolicy`,
and chooses the setting of each request: by its profile (`profiles`), its caller (`callers`), the load
(`overload`, `in_flight`), a rollout or the age of an image (`policy`). It reads a file again on SIGHUP (`reload`,
`grace`), and says in an answer what served it (`answers`). Methods that act inside the language model are in `in_llm`.

It lies in the same wheel because vLLM loads one entry point, and the settings of both arrive in one key. It is imported
where a setting or a request names one of its keys, and in the process of an HTTP server. `LLM(...)` with a plain
setting, engines and workers run without it.
"""
