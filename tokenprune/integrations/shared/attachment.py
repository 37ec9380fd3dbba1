# SPDX-License-Identifier: Apache-2.0
"""The patch of a model: its parts, and functions that find it on a model or on a wrapper of the model."""

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
    """The parts that `patch` attached to a model. The last part is the engine, which has the statistics.

    The attachment is stored on the module that the engine acts on. It can be found through any wrapper of this module.

    Args:
        feature_cache: Size of the feature cache, or None without a cache.
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
        self.wrap(self.engine.model, "extra_repr", self._make_extra_repr)
        setattr(self.engine.owner, _ATTRIBUTE, self)
        self.on_detach(partial(delattr, self.engine.owner, _ATTRIBUTE))

    def add(self, part: Attachable) -> None:
        """Attach one more part, which is then detached and attached together with the patch."""
        self.attach_part(part)
        self.parts.append(part)

    def _make_extra_repr(self, extra_repr: Callable[[], str]) -> Callable[[], str]:
        return partial(_append_lines, extra_repr, self.format_lines())

    def format_lines(self) -> list[str]:
        """Return the lines that `print(model)` shows: one per method, and one for each optional feature."""
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
        """Return the methods and budgets in one line, for messages."""
        return " + ".join(
            f"{method.name} ({budget})" for method, budget in zip(self.methods, self.budgets, strict=True)
        )


def _append_lines(extra_repr: Callable[[], str], lines: list[str]) -> str:
    """Return the `extra_repr` of a module with `lines` below it."""
    return "\n".join([*filter(None, [extra_repr()]), *lines])


def find_attachment(model: Any) -> Attachment | None:
    """Return the patch of a model, or of a model that it wraps, or None."""
    modules = model.modules() if hasattr(model, "modules") else ()
    return next((vars(module)[_ATTRIBUTE] for module in modules if _ATTRIBUTE in vars(module)), None)


def get_attachment(model: Any) -> Attachment:
    """Return the patch of a model. Raise NotPatchedError if there is none."""
    attachment = find_attachment(model)
    if attachment is None:
        raise NotPatchedError(f"This {type(model).__name__} is not patched. Call tokenprune.patch(model, ...) first.")
    return attachment


def is_patched(model: Any) -> bool:
    """Return True if a model, or a model that it wraps, is patched.

    Examples:
        >>> tokenprune.is_patched(model)
        False
        >>> with tokenprune.patched(model, "divprune", keep=0.25):
        ...     tokenprune.is_patched(model)
        True
    """
    return find_attachment(model) is not None
