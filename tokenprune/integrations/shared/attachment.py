# SPDX-License-Identifier: Apache-2.0
"""The patch that a model carries: its parts, and how to find it on a model or on a wrapper of the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tokenprune.budgets import Budget, compute_joint_share
from tokenprune.errors import NotPatchedError
from tokenprune.integrations.shared.attachable import Attachable
from tokenprune.selection.method import Method

_ATTRIBUTE = "_tokenprune_patch"


class Attachment(Attachable):
    """The parts that `patch` attached to a model; the last one, the engine, has the statistics.

    While it is attached, it stands in the module that the engine acts on: wrappers come and go around that, and all of
    them find it there.
    """

    def __init__(
        self, methods: list[Method], budgets: list[Budget], parts: list[Any], feature_cache: int | None
    ) -> None:
        super().__init__()
        self.feature_cache = feature_cache
        self.methods, self.budgets, self.parts, self.engine = methods, budgets, parts, parts[-1]

    def _attach(self) -> None:
        for part in self.parts:
            self.attach_part(part)
        self.wrap(self.engine.model, "extra_repr", self._with_lines)
        setattr(self.engine.owner, _ATTRIBUTE, self)
        self.on_detach(partial(delattr, self.engine.owner, _ATTRIBUTE))

    def add(self, part: Attachable) -> None:
        """Attach one more part, which goes with the patch and comes back with it."""
        self.attach_part(part)
        self.parts.append(part)

    def _with_lines(self, extra_repr: Callable[[], str]) -> Callable[[], str]:
        return partial(_append_lines, extra_repr, self.format_lines())

    def format_lines(self) -> list[str]:
        """Return what `print(model)` shows of the patch: a line for each method, one for encoded images, one for the
        guard."""
        lines = [
            f"tokenprune: {method!r}, keep={budget.format_short()}, site={method.site}"
            for method, budget in zip(self.methods, self.budgets, strict=True)
        ]
        together = compute_joint_share(self.budgets) if len(self.budgets) > 1 else None
        if together is not None:
            lines.append(f"tokenprune: {len(self.budgets)} methods, together keep={together:.4g}")
        if self.feature_cache is not None:
            lines.append(f"tokenprune: feature_cache={self.feature_cache}")
        return lines + [f"tokenprune: {part.line}" for part in getattr(self.engine, "parts", ()) if part.line]

    def describe(self) -> str:
        return " + ".join(
            f"{method.name} ({budget})" for method, budget in zip(self.methods, self.budgets, strict=True)
        )


def _append_lines(extra_repr: Callable[[], str], lines: list[str]) -> str:
    """Return what a module says of itself, with `lines` below it."""
    return "\n".join([*filter(None, [extra_repr()]), *lines])


def find_attachment(model: Any) -> Attachment | None:
    """Return what `patch` left on a model, or on one that it wraps; None if there is no patch."""
    modules = model.modules() if hasattr(model, "modules") else ()
    return next((vars(one)[_ATTRIBUTE] for one in modules if _ATTRIBUTE in vars(one)), None)


def get_attachment(model: Any) -> Attachment:
    """Return what `patch` left on the model; raises NotPatchedError."""
    attachment = find_attachment(model)
    if attachment is None:
        raise NotPatchedError(f"this {type(model).__name__} is not patched: call tokenprune.patch(model, ...) first")
    return attachment


def is_patched(model: Any) -> bool:
    """Return whether the model carries a patch, as a whole or in what it wraps."""
    return find_attachment(model) is not None
