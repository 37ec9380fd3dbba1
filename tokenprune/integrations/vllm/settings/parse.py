# SPDX-License-Identifier: Apache-2.0
"""Parse and check the settings of servers, profiles and requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

from tokenprune.budgets import Budget
from tokenprune.errors import BudgetError, OptionError, TokenPruneError, shorten
from tokenprune.integrations.shared import checks
from tokenprune.integrations.vllm.settings.items import OFF
from tokenprune.integrations.vllm.settings.keys import KEY
from tokenprune.selection.files import File
from tokenprune.selection.method import Method, Site
from tokenprune.selection.observable_registry import compares_frames
from tokenprune.selection.sites import check_sites
from tokenprune.selection.sites.encoder import EncoderMethod
from tokenprune.selection.sites.pixels import ResizeMethod
from tokenprune.selection.sites.units import UnitDropper
from tokenprune.settings import IN_LLM, Setting
from tokenprune.settings.budget_checks import check_scope
from tokenprune.settings.json_values import to_plain_json

_MAX_LENGTH = 2048  # characters of a setting as JSON


def parse_setting(*layers: Any, trusted: bool = True) -> Setting:
    """Merge settings, the later over the earlier, and check that vLLM can serve the result.

    A layer that names other methods drops the options of the layer before.

    Args:
        layers: Settings as JSON objects.
        trusted: False if the last layer comes from a request. A request must not name a file: an option that names
            one is refused before any file is opened.

    Returns:
        The normalized setting: every option and keep is written out, files are read, and the method that resizes images
        comes first. Settings that reduce alike are equal.

    Raises:
        OptionError, UnknownMethodError, BudgetError: If a layer is invalid or the result cannot be served. These are
            ValueErrors, which a server answers with HTTP 400.
    """
    return _parse(tuple(_to_text(layer) for layer in layers), trusted)


def parse_request(server: Mapping[str, Any], requested: Mapping[str, Any]) -> Setting:
    """Return the setting of a request over a normalized setting; raises like `parse_setting` and `check_override`."""
    if not requested:
        return parse_setting(server)
    setting = parse_setting(server, requested, trusted=False)
    check_override(parse_setting(server), setting)
    return setting


def check_override(server: Setting, request: Setting) -> None:
    """Raise OptionError if a request changes a server's method and one of the two acts inside the language model.

    The layers of the language model are prepared for one method when the server starts.
    """
    if (server.in_llm or request.in_llm) and not request.off and _get_reduction(request) != _get_reduction(server):
        raise OptionError(
            f"{IN_LLM} is set for the whole server when it starts. A request can only switch pruning off with "
            '{"off": true}.'
        )


def _get_reduction(setting: Setting) -> tuple[Any, ...]:
    """Return the values of a setting that determine the kept tokens, to compare settings.

    Unlike JSON texts, the values do not distinguish 1 and 1.0.
    """
    return setting.in_llm, setting.pixel_method, setting.pixel_budget, setting.method, setting.budget


def _to_text(layer: Any) -> str:
    """Return a layer as JSON text; raise OptionError or BudgetError if it is not a valid object."""
    if not isinstance(layer, Mapping):
        raise OptionError(
            f'{KEY} must be an object like {{"method": "divprune", "keep": 0.25}} or {{"off": true}}, '
            f"not {shorten(layer)}"
        )
    if "config" in layer:  # a server's own was read before
        raise OptionError(f"{KEY}: config names a file of the server. Only the server's setting may contain it.")
    text = json.dumps(to_plain_json(layer, KEY))
    if len(text) > _MAX_LENGTH:
        raise OptionError(f"{KEY} has {len(text)} characters. At most {_MAX_LENGTH} are allowed.")
    return text


# Each request is parsed several times, and many requests are equal. Exceptions are not cached.
@lru_cache(maxsize=256)
def _parse(layers: tuple[str, ...], trusted: bool) -> Setting:
    merged: Setting | None = None
    for index, text in enumerate(layers, start=1):
        layer = Setting.from_json(json.loads(text), KEY).resolve(merged)
        if index == len(layers) and not trusted:
            layer = layer.without_files()
        merged = layer.merge_onto(merged)
    if merged is None or merged.off:
        return OFF
    merged = merged.with_files(_read_file)
    _check(merged)
    return _normalize(merged)


# A server reads each of its files once, so that its setting means the same as long as it runs.
_read_file = lru_cache(maxsize=64)(File.read)


def _check(setting: Setting) -> None:
    """Raise OptionError or BudgetError if vLLM cannot serve a setting."""
    per, count = setting.per or "image", len(setting.all_names)
    if per not in ("image", "frame"):
        raise OptionError(f'{KEY}: per must be "image" or "frame", not {shorten(per)}')
    if setting.in_llm and count > 1:
        raise OptionError(f"{KEY}: {IN_LLM} supports one method, not {count}")
    methods = setting.methods
    for keep in setting.keep if isinstance(setting.keep, list) else [setting.keep]:
        if isinstance(keep, dict) and set(keep) - {"age", "step"} not in ({"keep"}, {"tokens"}):
            raise _build_number_error(keep)
    for method, budget in zip(methods, setting.budgets, strict=True):
        _check_step(method, budget, bool(setting.in_llm))
    check_sites(methods)
    num_token_methods = sum(method.site is not Site.PRE_ENCODER for method in methods)
    if num_token_methods > 1:
        raise OptionError(f"{KEY}: only one method may act after the image processor, not {num_token_methods}")
    if (token_method := setting.method) is None:
        return
    if per == "frame" and token_method.site is not Site.PRE_LLM:
        raise OptionError(f'{KEY}: per="frame" supports only methods that act on features, not {token_method.name}')
    if per == "frame" and compares_frames(token_method):
        raise BudgetError(
            f"{KEY}: {token_method.name} compares the frames of a video, so the whole video has one budget. Leave out "
            'per="frame".'
        )
    if setting.budget.ages is not None and compares_frames(token_method):
        raise BudgetError(f"{KEY}: {token_method.name} does not prune images. Leave out age=.")


def _normalize(setting: Setting) -> Setting:
    """Return the same reduction with every default written out; see `parse_setting`."""
    num_limits = len(setting.all_names) - len(setting.names)
    steps = list(zip(setting.methods[num_limits:], setting.budgets[num_limits:], setting.options, strict=True))
    steps.sort(key=lambda step: not isinstance(step[0], ResizeMethod))
    keeps = [budget.to_json() for _, budget, _ in steps]
    return Setting(
        names=tuple(method.name for method, _, _ in steps),
        options=tuple(_write_out_options(method, options) for method, _, options in steps),
        keep=keeps if len(keeps) > 1 else keeps[0] if keeps else None,
        per=None if setting.per == "image" else setting.per,
        in_llm=setting.in_llm or None,
        where=KEY,
        max_visual_tokens=setting.max_visual_tokens,
    )


def _write_out_options(method: Method, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of a method. Options that name a file hold the `File` that was read."""
    written = {field.name: getattr(method, field.name) for field in fields(method)}
    return written | {name: value for name, value in options.items() if isinstance(value, File)}


def _build_number_error(keep: Any) -> BudgetError:
    return BudgetError(
        f"{KEY}: keep must be a number (4 for four tokens, 0.25 for a share), optionally with age and step, not "
        f"{shorten(keep)}"
    )


def _check_step(method: Method, budget: Budget, in_llm: bool) -> None:
    """Raise OptionError or BudgetError if vLLM cannot serve one method with its budget."""
    keep = budget.keep
    if keep is None:
        raise _build_number_error(budget)
    check_scope(method, budget)
    try:
        check_method(method, in_llm)
    except TokenPruneError:
        raise
    except Exception as error:  # raised by the method's own code in the trial run
        raise OptionError(f"{KEY}: {method.name} fails with these options: {error}") from error
    if method.site is Site.PRE_ENCODER:
        assert isinstance(method, ResizeMethod)  # `check_method` refuses others
        if not isinstance(keep, int):
            method.check_keep(keep)
        elif not method.takes_tokens:
            raise BudgetError(f"{method.name} takes keep as a share (a float), not {keep}")


def check_method(method: Method, in_llm: bool = False) -> None:
    """Raise OptionError if vLLM cannot serve a method; the message names an alternative."""
    if reason := checks.find_unserved_reason(method, in_llm) or _find_failure(method, in_llm):
        raise OptionError(reason)


def _find_failure(method: Any, in_llm: bool) -> str | None:
    """Run a method on a small example and return why it fails, or None."""
    if method.site is Site.PRE_ENCODER or isinstance(method, (EncoderMethod, UnitDropper)):
        return None  # the example has neither pixels nor a tower
    from tokenprune.integrations.vllm.selection import before_llm
    from tokenprune.integrations.vllm.selection import in_llm as inside

    try:
        (inside if in_llm else before_llm).probe(method)
    except TokenPruneError as error:
        return checks.format_refusal(method, str(error), in_llm)
    return None
