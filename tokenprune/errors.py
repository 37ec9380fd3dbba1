# SPDX-License-Identifier: Apache-2.0
"""Exceptions of tokenprune. Each message states the problem and how to solve it."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = [
    "AlreadyPatchedError",
    "BudgetError",
    "ConfigError",
    "ConformanceError",
    "MissingPackageError",
    "NotPatchedError",
    "OptionError",
    "PlaceholderMismatchError",
    "RegistrationError",
    "SessionError",
    "TokenPruneError",
    "UnknownMethodError",
    "UnknownPolicyError",
    "UnsupportedModelError",
    "UnsupportedSetupError",
]


class TokenPruneError(Exception):
    """Base class of all errors of this library.

    Examples:
        >>> try:
        ...     tokenprune.patch(model, keep=2.5)
        ... except tokenprune.TokenPruneError as error:
        ...     print(type(error).__name__)
        BudgetError
    """


class UnknownMethodError(TokenPruneError, ValueError):
    """No method is registered under this name.

    Examples:
        >>> tokenprune.method("divprun")
        Traceback (most recent call last):
        tokenprune.errors.UnknownMethodError: unknown method 'divprun'...
    """


class UnknownPolicyError(TokenPruneError, ValueError):
    """No session policy is registered under this name."""


class SessionError(TokenPruneError, RuntimeError):
    """A session cannot process a call: it has no image yet, another thread uses it, or its model has changed."""


class RegistrationError(TokenPruneError, ValueError):
    """A method, an observable, a policy or an adapter cannot be registered."""


class OptionError(TokenPruneError, ValueError):
    """An option or an argument is unknown, or has an invalid value.

    Examples:
        >>> tokenprune.method("fastv", layer=0)
        Traceback (most recent call last):
        tokenprune.errors.OptionError: fastv: layer=0 must be an int >= 1
    """


class BudgetError(TokenPruneError, ValueError):
    """`keep` or a `Budget` is invalid, or cannot be reached.

    Examples:
        >>> tokenprune.Budget(keep=2.5)
        Traceback (most recent call last):
        tokenprune.errors.BudgetError: keep=2.5 is not a valid share...
    """


class UnsupportedModelError(TokenPruneError, TypeError):
    """The model is not supported.

    Examples:
        >>> model = tokenprune.patch(torch.nn.Linear(2, 2))
        Traceback (most recent call last):
        tokenprune.errors.UnsupportedModelError: ...
    """


class UnsupportedSetupError(TokenPruneError, RuntimeError):
    """The model is supported, but not in this mode (static cache, gradient checkpointing, flex attention, ...)."""


class AlreadyPatchedError(TokenPruneError, RuntimeError):
    """The model is already patched.

    Examples:
        >>> model = tokenprune.patch(tokenprune.patch(model))
        Traceback (most recent call last):
        tokenprune.errors.AlreadyPatchedError: The model is already patched with...
    """


class NotPatchedError(TokenPruneError, RuntimeError):
    """The model is not patched.

    Examples:
        >>> model = tokenprune.unpatch(model)
        Traceback (most recent call last):
        tokenprune.errors.NotPatchedError: ...
    """


class PlaceholderMismatchError(TokenPruneError, ValueError):
    """The prompt has a different number of image placeholders than the encoder has features."""


class ConformanceError(TokenPruneError, AssertionError):
    """A method violates a rule for all methods. Raised by `tokenprune.testing.check_method`."""


class MissingPackageError(TokenPruneError, ImportError):
    """An optional package is not installed."""


class ConfigError(TokenPruneError, ValueError):
    """A configuration or session file cannot be read or written, or is invalid."""


def shorten(value: Any) -> str:
    """Return the repr of a value for a message, with at most 80 characters."""
    try:
        text = repr(value)
    except Exception:  # nested too deeply, or an integer with too many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."


def require(module: str, what: str) -> Any:
    """Import a module that needs transformers, tokenprune-demo or tokenprune-bench.

    Args:
        module: Name of the module.
        what: Start of the message, followed by the command to install the package.

    Raises:
        MissingPackageError: If the package is not installed.
    """
    packages = {name: name.replace("_", "-") for name in ("tokenprune_bench", "tokenprune_demo")}
    packages["transformers"] = "'tokenprune-vlm[hf]'"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in packages:
            raise
        raise MissingPackageError(f"{what}: pip install {packages[error.name]}") from None
