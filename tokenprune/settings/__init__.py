# SPDX-License-Identifier: Apache-2.0
"""`Setting`: methods, their options and their budgets as one value, which files, command lines and requests hold."""

from tokenprune.settings.keys import IN_LLM, SCOPE
from tokenprune.settings.setting import Setting

__all__ = ["IN_LLM", "SCOPE", "Setting"]
