# SPDX-License-Identifier: Apache-2.0
"""A setting as lines to copy: Python, the flag of a vLLM server, and a benchmark of it."""

from __future__ import annotations

import json
import shlex
from typing import Any

from tokenprune.base import Site
from tokenprune.config import read_config
from tokenprune.errors import TokenPruneError
from tokenprune.integrations.vllm.setting.settings import KEY, Setting

LONGEST = 2000  # characters of a question, or of a setting


def python(*settings: dict[str, Any]) -> str:
    """Return the calls that patch a model, each further one in the place of the one before."""
    return "\n# or, in its place:\n".join(_patch(setting, bool(place)) for place, setting in enumerate(settings))


def _patch(setting: dict[str, Any], again: bool) -> str:
    pixels = any(method.site is Site.PRE_ENCODER for method in read_config(setting).steps()[0])
    more = (", processor=processor" if pixels else "") + (", replace=True" if again else "")
    if isinstance(setting["method"], str) and set(setting) == {"method", "keep"}:
        return f'tokenprune.patch(model, "{setting["method"]}", keep={setting["keep"]!r}{more})'
    return f"tokenprune.patch(model, config={setting!r}{more})"


def vllm(setting: dict[str, Any]) -> str:
    """Return the flag of `vllm serve`, or why it cannot be served."""
    try:
        Setting.of(setting)
    except TokenPruneError as error:
        return f"# {str(error).splitlines()[0]}"
    return f"vllm serve MODEL --mm-processor-kwargs {shlex.quote(json.dumps({KEY: setting}))}"


def bench(spelling: str, keep: float, model: str) -> str:
    """Return the command that measures the setting. model: as `--model` takes it."""
    return shlex.join(["tokenprune", "bench", "--model", model, "--methods", spelling, "--keep", repr(keep)])
