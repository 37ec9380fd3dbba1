# SPDX-License-Identifier: Apache-2.0
"""Every error that tokenprune raises on purpose; the text always says what to do instead."""

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
    """Base class of all errors of this library."""


class UnknownMethodError(TokenPruneError, ValueError):
    """No method is registered under the given name."""


class UnknownPolicyError(TokenPruneError, ValueError):
    """No policy of sessions is registered under the given name."""


class SessionError(TokenPruneError, RuntimeError):
    """A session cannot do what was asked: nothing to see, a second thread inside, a model that changed since."""


class RegistrationError(TokenPruneError, ValueError):
    """A method or adapter cannot be registered as asked."""


class OptionError(TokenPruneError, ValueError):
    """A method got an option it does not have, or a value it cannot use."""


class BudgetError(TokenPruneError, ValueError):
    """`keep` (or a `Budget`) does not describe a number of tokens."""


class UnsupportedModelError(TokenPruneError, TypeError):
    """The model does not follow the contract that the engine needs."""


class UnsupportedSetupError(TokenPruneError, RuntimeError):
    """The model is supported, but not in this mode (static cache, gradient checkpointing, flex attention ...)."""


class AlreadyPatchedError(TokenPruneError, RuntimeError):
    """The model carries a patch already."""


class NotPatchedError(TokenPruneError, RuntimeError):
    """The model carries no patch."""


class PlaceholderMismatchError(TokenPruneError, ValueError):
    """The prompt holds another number of image placeholders than the encoder returned features."""


class ConformanceError(TokenPruneError, AssertionError):
    """A method does not do what every method has to; raised by `tokenprune.testing.check_method`."""


class MissingPackageError(TokenPruneError, ImportError):
    """A package that is installed apart is needed, and absent."""


class ConfigError(TokenPruneError, ValueError):
    """A file such as `tokenprune.json` cannot be read or written, or is none."""


def shorten(value: Any) -> str:
    """Return what to show of a wrong value."""
    try:
        text = repr(value)
    except Exception:  # too deep, or a number of too many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."


def require(module: str, what: str) -> Any:
    """Import a module of tokenprune-demo or tokenprune-bench. what: what to say in front of "pip install".

    Raises MissingPackageError, which says what to install, where the package is absent.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise MissingPackageError(f"{what}: pip install {package.replace('_', '-')}") from None
