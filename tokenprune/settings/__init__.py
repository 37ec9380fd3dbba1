# SPDX-License-Identifier: Apache-2.0
"""`Setting`: methods, options and budgets as one value, for files, command lines and requests."""

from tokenprune.settings.keys import IN_LLM, SCOPE
from tokenprune.settings.setting import Setting

__all__ = ["IN_LLM", "SCOPE", "Setting"]
