# SPDX-License-Identifier: Apache-2.0
"""Make vision-language models see fewer visual tokens, in one line: `tokenprune.patch(model, method="divprune",
keep=0.25)`.

Importing this package changes nothing in torch or transformers, and loads neither: names are resolved on first use.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from tokenprune.models.torch_import import require

__version__ = "0.1.0"

# Where each public name lives. What extensions, sessions and readers of statistics need, and the other errors, are in
# public modules of their own: `_MODULES`.
_HOMES = {
    "tokenprune.api": ("patch", "unpatch", "patched", "is_patched", "stats", "feature_cache", "method"),
    "tokenprune.integrations.hf.pixels.api": ("patch_processor", "unpatch_processor"),
    "tokenprune_bench.two_pass": ("escalate", "Escalation"),
    "tokenprune.integrations.hf.drafting.assistant": ("assistant",),
    "tokenprune_bench.frame_weights": ("frame_weights",),
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
    "tokenprune.settings.saved": ("Config", "read_config", "write_config"),
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
_MODULES = ("errors", "extend", "sessions", "statistics")
# These change only after a deprecation; all others are experimental (docs/reference/stability.md).
_STABLE = frozenset(
    "patch unpatch patched is_patched stats method available_methods method_info register Budget Stats "
    "Config read_config write_config Method Pruner Selection VisualTokens Site MethodInfo".split()
) | {*_HOMES["tokenprune.errors"]}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
# Names that stood here; each works for one more release, warns, and says where it is.
_MOVED = {
    name: home
    for home, names in {
        "tokenprune.errors": "UnknownPolicyError SessionError RegistrationError PlaceholderMismatchError ConfigError "
        "ConformanceError MissingPackageError",
        "tokenprune.selection": "ResizeMethod ImageChooser AttentionPattern EncoderMethod Tower UnitDropper FrameMerger "
        "FrameMix DecodeMethod VideoPruner Videos Observable TokenSource available_observables register_observable",
        "tokenprune.integrations.hf.sessions": "session Session SessionStats Answer HeldEntries available_policies policy "
        "register_policy Policy PolicyView",
        "tokenprune.statistics": "Cut Removal Guarded FeatureCacheCounts",
        "tokenprune_bench.calibration": "calibrate fit_d2pruner fit_dyrate fit_fitprune Thresholds",
        "tokenprune_bench.recommend.recommendation": "Recommendation",
    }.items()
    for name in names.split()
}

if TYPE_CHECKING:
    from tokenprune.api import feature_cache, is_patched, method, patch, patched, stats, unpatch
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
    from tokenprune.integrations.hf.drafting.assistant import assistant
    from tokenprune.integrations.hf.drafting.cost import DraftCost
    from tokenprune.integrations.hf.families.retrieval import vectors
    from tokenprune.integrations.hf.feature_cache.cache import FeatureCache
    from tokenprune.integrations.hf.guard.settings import Guard
    from tokenprune.integrations.hf.pixels.api import patch_processor, unpatch_processor
    from tokenprune.methods.registry import MethodInfo, available_methods, method_info, register
    from tokenprune.models.token_counts import count_visual_tokens
    from tokenprune.selection.method import Method, Pruner, Selection, Site
    from tokenprune.selection.tokens import VisualTokens
    from tokenprune.settings.saved import Config, read_config, write_config
    from tokenprune.statistics import Stats
    from tokenprune_bench.frame_weights import frame_weights
    from tokenprune_bench.two_pass import Escalation, escalate


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"tokenprune.{name}")
    if (home := _HOME_OF.get(name) or _MOVED.get(name)) is None:
        raise AttributeError(f"module 'tokenprune' has no attribute {name!r}")
    module = importlib.import_module(home) if home.startswith("tokenprune.") else require(home, f"tokenprune.{name}")
    value = getattr(module, name)
    if name in _MOVED:
        warnings.warn(f"tokenprune.{name} is {home}.{name} now", DeprecationWarning, stacklevel=2)
    else:
        globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF, *_MODULES])


__all__ = ["__version__", *_HOME_OF]
