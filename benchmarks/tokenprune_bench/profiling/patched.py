# SPDX-License-Identifier: Apache-2.0
"""Contexts in which a loaded model is patched with a setting."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tokenprune import api
from tokenprune.errors import UnsupportedSetupError
from tokenprune.selection.method import Method, Site
from tokenprune.settings import Setting
from tokenprune_bench.profiling.model import Model
from tokenprune_bench.two_pass import ESCALATE

UNPATCHED = "unpatched"  # method name of the unpatched model in tables and records


def patched(
    subject: Model,
    name: str,
    keep: float | int | dict[str, float],
    videos: bool = False,
    record: bool = False,
    **options: Any,
) -> AbstractContextManager[Any]:
    """Return a context that patches the model with a method given by name. `UNPATCHED` leaves the model unchanged."""
    setting = None if name == UNPATCHED else Setting.from_json({"method": name, "keep": keep} | options)
    return patched_by(subject, setting, videos, record)


def patched_by(
    subject: Model, setting: Setting | None, videos: bool = False, record: bool = False
) -> AbstractContextManager[Any]:
    """Return a context that patches the model with a setting. Methods on pixels get the model's processor.

    Args:
        subject: The model.
        setting: The setting, or None for the unpatched model.
        videos: Whether the model sees videos.
        record: Whether to record the cuts.
    """
    if setting is None:
        return nullcontext()
    more: dict[str, Any] = {"record": record}
    for method in get_methods(setting):
        if not videos and (method.site is Site.ATTENTION or "frames" in method.needs):
            raise UnsupportedSetupError(f"{method.name} works on videos, but the model sees images only here.")
        if method.site is Site.PRE_ENCODER:
            more["processor"] = subject.processor
    return api.patched(subject.model, config=setting, guard="off", **more)


def get_methods(setting: Setting | None) -> list[Method]:
    """Return the methods of a setting in order, empty for the unpatched model and for escalation."""
    return [] if setting is None or is_escalation(setting) else setting.methods


def has_limit(setting: Setting) -> bool:
    """Return True if a setting limits the tokens of an image by its pixels, as `max_visual_tokens` does."""
    return not is_escalation(setting) and setting.pixel_budget.tokens is not None


def build_escalation(keep: float | int) -> Setting:
    """Return the setting for two passes. It is for benchmarks only; `patch` does not accept it."""
    return Setting((ESCALATE,), ({},), keep)


def is_escalation(setting: Setting | None) -> bool:
    """Return True for the setting for two passes (`tokenprune_bench.two_pass.escalate`)."""
    return setting is not None and setting.name == ESCALATE
