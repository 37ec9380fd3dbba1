# SPDX-License-Identifier: Apache-2.0
"""A setting as code to copy: Python, a flag of `vllm serve`, and a benchmark command."""

from __future__ import annotations

import json
import shlex

from tokenprune.errors import TokenPruneError
from tokenprune.integrations.vllm.settings.keys import KEY
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.selection.method import Site
from tokenprune.settings import Setting

LONGEST = 2000  # maximum characters of a question or a setting


def python(*settings: Setting) -> str:
    """Return the calls that patch a model, one per setting."""
    return "\n# or:\n".join(_patch(setting, bool(index)) for index, setting in enumerate(settings))


def _patch(setting: Setting, again: bool) -> str:
    pixels, said = any(method.site is Site.PRE_ENCODER for method in setting.methods), setting.to_json()
    more = (", processor=processor" if pixels else "") + (", replace=True" if again else "")
    if isinstance(said["method"], str) and set(said) == {"method", "keep"}:
        return f'tokenprune.patch(model, "{said["method"]}", keep={said["keep"]!r}{more})'
    return f"tokenprune.patch(model, config={said!r}{more})"


def vllm(setting: Setting) -> str:
    """Return the command of `vllm serve`, or a comment with the reason if vLLM does not support the setting."""
    try:
        parse_setting(setting.to_json())
    except TokenPruneError as error:
        return f"# {str(error).splitlines()[0]}"
    return f"vllm serve MODEL --mm-processor-kwargs {shlex.quote(json.dumps({KEY: setting.to_json()}))}"


def bench(setting: Setting, model: str) -> str:
    """Return the command that measures the setting. `model` is a value of `--model`."""
    options = ["--model", model, "--methods", setting.to_text(), "--keep", repr(setting.keep)]
    if (limit := setting.max_visual_tokens) is not None:  # `tokenprune bench` does not have this option
        return shlex.join(["tokenprune", "profile", *options, "--max-visual-tokens", str(limit)])
    return shlex.join(["tokenprune", "bench", *options])
