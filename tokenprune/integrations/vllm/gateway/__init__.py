# SPDX-License-Identifier: Apache-2.0
"""Server keys beside the setting: profiles, callers, load, limits, rollouts and budgets by age.

`tokenprune.integrations.vllm` prunes images under one setting. This package implements `RequestPolicy` and selects the
setting of each request: by profile (`profiles`), caller (`callers`), load (`overload`, `in_flight`), rollout or the age
of an image (`policy`). It reloads its file on SIGHUP (`reload`) and reports the setting in the answer (`answers`).

The package is imported if a setting or a request has one of its keys, and in the process of an HTTP server.
`LLM(...)` with a plain setting, engines and workers run without it.
"""
