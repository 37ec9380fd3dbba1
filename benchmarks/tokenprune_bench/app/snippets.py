# SPDX-License-Identifier: Apache-2.0
"""A setting as lines to copy: Python, the flag of a vLLM server, and a benchmark of it."""

from __future__ import annotations

import json
import shlex

from tokenprune.errors import TokenPruneError
from tokenprune.integrations.vllm.settings.keys import KEY
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.selection.method import Site
from tokenprune.settings import Setting

LONGEST = 2000  # characters of a question, or of a setting


def python(*settings: Setting) -> str:
    """Return the calls that patch a model, each further one in the place of the one before."""
    return "\n# or, in its place:\n".join(_patch(setting, bool(place)) for place, setting in enumerate(settings))


def _patch(setting: Setting, again: bool) -> str:
    pixels, said = any(method.site is Site.PRE_ENCODER for method in setting.methods), setting.to_json()
    more = (", processor=processor" if pixels else "") + (", replace=True" if again else "")
    if isinstance(said["method"], str) and set(said) == {"method", "keep"}:
        return f'tokenprune.patch(model, "{said["method"]}", keep={said["keep"]!r}{more})'
    return f"tokenprune.patch(model, config={said!r}{more})"


def vllm(setting: Setting) -> str:
    """Return the flag of `vllm serve`, or why it cannot be served."""
    try:
        parse_setting(setting.to_json())
    except TokenPruneError as error:
        return f"# {str(error).splitlines()[0]}"
    return f"vllm serve MODEL --mm-processor-kwargs {shlex.quote(json.dumps({KEY: setting.to_json()}))}"


def bench(setting: Setting, model: str) -> str:
    """Return the command that measures the setting. model: as `--model` takes it."""
    return shlex.join(
        ["tokenprune", "bench", "--model", model, "--methods", setting.to_text(), "--keep", repr(setting.keep)]
    )
