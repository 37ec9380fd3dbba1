# SPDX-License-Identifier: Apache-2.0
"""Prune visual tokens of vision-language models: `tokenprune.patch(model, method="divprune", keep=0.25)`.

Importing this package neither imports nor changes torch and transformers: names are resolved on first access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tokenprune.errors import require

__version__ = "0.1.0"

# Names exported by each module. `_MODULES` lists the public modules.
_NAMES = {
    "tokenprune.api": ("patch", "unpatch", "patched", "is_patched", "stats", "feature_cache", "method", "assistant"),
    "tokenprune.integrations.reduction": ("reduce",),
    "tokenprune.integrations.hf.pixels.api": ("patch_processor", "unpatch_processor"),
    "tokenprune.integrations.hf.pixels.loading": ("load_image",),
    "tokenprune.integrations.hf.pixels.video_files": ("load_video",),
    "tokenprune_bench.recommend.recommendation": ("recommend",),
    "tokenprune_bench.profiling.model": ("demo_model",),
    "tokenprune_bench.show.side_by_side": ("plot",),
    "tokenprune.integrations.hf.drafting.cost": ("DraftCost",),
    "tokenprune.methods.registry": ("available_methods", "method_info", "register", "MethodInfo"),
    "tokenprune.budgets": ("Budget",),
    "tokenprune.integrations.hf.guard.settings": ("Guard",),
    "tokenprune.statistics": ("Stats",),
    "tokenprune.integrations.hf.families.retrieval": ("vectors",),
    "tokenprune.selection.method": ("Method", "Pruner", "Selection", "Site"),
    "tokenprune.integrations.hf.feature_cache.cache": ("FeatureCache",),
    "tokenprune.selection.tokens": ("VisualTokens",),
    "tokenprune.models.token_counts": ("count_visual_tokens",),
    "tokenprune.settings.setting": ("Setting",),
    "tokenprune.settings.saved": ("read_config", "write_config"),
    "tokenprune.errors": (
        "TokenPruneError",
        "UnknownMethodError",
        "UnsupportedModelError",
        "UnsupportedSetupError",
        "BudgetError",
        "OptionError",
        "AlreadyPatchedError",
        "NotPatchedError",
    ),
}
_MODULES = {
    "errors": "tokenprune.errors",
    "graphs": "tokenprune.integrations.hf.graphs",
    "llama_cpp": "tokenprune.integrations.llama_cpp",
    "selection": "tokenprune.selection",
    "sessions": "tokenprune.integrations.hf.sessions",
    "statistics": "tokenprune.statistics",
}
# Stable names change only after a deprecation. The other names are experimental (docs/reference/stability.md).
_STABLE = frozenset(
    "patch unpatch patched is_patched stats method available_methods method_info register Budget Stats "
    "Setting read_config write_config Method Pruner Selection VisualTokens Site MethodInfo".split()
) | {*_NAMES["tokenprune.errors"]}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

if TYPE_CHECKING:
    from tokenprune.api import assistant, feature_cache, is_patched, method, patch, patched, stats, unpatch
    from tokenprune.budgets import Budget
    from tokenprune.errors import (
        AlreadyPatchedError,
        BudgetError,
        NotPatchedError,
        OptionError,
        TokenPruneError,
        UnknownMethodError,
        UnsupportedModelError,
        UnsupportedSetupError,
    )
    from tokenprune.integrations.hf.drafting.cost import DraftCost
    from tokenprune.integrations.hf.families.retrieval import vectors
    from tokenprune.integrations.hf.feature_cache.cache import FeatureCache
    from tokenprune.integrations.hf.guard.settings import Guard
    from tokenprune.integrations.hf.pixels.api import patch_processor, unpatch_processor
    from tokenprune.integrations.hf.pixels.loading import load_image
    from tokenprune.integrations.hf.pixels.video_files import load_video
    from tokenprune.integrations.reduction import reduce
    from tokenprune.methods.registry import MethodInfo, available_methods, method_info, register
    from tokenprune.models.token_counts import count_visual_tokens
    from tokenprune.selection.method import Method, Pruner, Selection, Site
    from tokenprune.selection.tokens import VisualTokens
    from tokenprune.settings.saved import read_config, write_config
    from tokenprune.settings.setting import Setting
    from tokenprune.statistics import Stats


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if (module_name := _MODULE_OF.get(name)) is None:
        raise AttributeError(f"module 'tokenprune' has no attribute {name!r}")
    value = getattr(require(module_name, f"tokenprune.{name}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF, *_MODULES])


__all__ = ["__version__", *_MODULE_OF]
