# SPDX-License-Identifier: Apache-2.0
"""A loaded model patched for a while, by a setting that a table can name."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tokenprune import api
from tokenprune.errors import UnsupportedSetupError
from tokenprune.selection.method import Method, Site
from tokenprune.settings import Setting
from tokenprune_bench.profiling.model import Model
from tokenprune_bench.two_pass import ESCALATE

UNPATCHED = "unpatched"  # stands for a method in tables and records


def patched(
    subject: Model,
    name: str,
    keep: float | int | dict[str, float],
    videos: bool = False,
    record: bool = False,
    **options: Any,
) -> AbstractContextManager[Any]:
    """Return `patched_by` for a method by its name, with its options; `UNPATCHED` leaves the model as it is."""
    setting = None if name == UNPATCHED else Setting.from_json({"method": name, "keep": keep} | options)
    return patched_by(subject, setting, videos, record)


def patched_by(
    subject: Model, setting: Setting | None, videos: bool = False, record: bool = False
) -> AbstractContextManager[Any]:
    """Return a context in which the subject's model is patched; methods that act on pixels get its processor.

    setting: None for the unpatched model. videos: whether the model sees videos.
    """
    if setting is None:
        return nullcontext()
    more: dict[str, Any] = {"record": record}
    for method in get_methods(setting):
        if not videos and (method.site is Site.ATTENTION or "frames" in method.needs):
            raise UnsupportedSetupError(
                f"{method.name} acts on videos, and here the model sees images only: it would leave them as they are"
            )
        if method.site is Site.PRE_ENCODER:
            more["processor"] = subject.processor
    return api.patched(subject.model, config=setting, guard="off", **more)


def get_methods(setting: Setting | None) -> list[Method]:
    """Return the methods of a setting, in their order."""
    return [] if setting is None or is_escalation(setting) else setting.methods


def build_escalation(keep: float | int) -> Setting:
    """Return the setting that asks twice; it is for benchmarks, and no patch."""
    return Setting((ESCALATE,), ({},), keep)


def is_escalation(setting: Setting | None) -> bool:
    """Return True for a setting that asks twice (`tokenprune_bench.two_pass.escalate`), which is no patch."""
    return setting is not None and setting.name == ESCALATE
