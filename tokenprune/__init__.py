# SPDX-License-Identifier: Apache-2.0
"""Make vision-language models see fewer visual tokens, in one line: `tokenprune.patch(model, method="divprune",
keep=0.25)`.

Importing this package changes nothing in torch or transformers, and loads neither: names are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tokenprune.startup import require

__version__ = "0.1.0"

# Where each public name lives.
_HOMES = {
    "tokenprune.api": ("patch", "unpatch", "patched", "is_patched", "stats", "feature_cache", "method"),
    "tokenprune.workflows.processors": ("patch_processor", "unpatch_processor"),
    "tokenprune.workflows.two_pass": ("escalate", "Escalation"),
    "tokenprune.workflows.drafts": ("assistant",),
    "tokenprune.workflows.frame_weights": ("frame_weights",),
    "tokenprune.workflows.session": ("session", "Session"),
    "tokenprune.workflows.session_results": ("SessionStats", "Answer", "HeldEntries"),
    "tokenprune.policies.registry": ("available_policies", "policy", "register_policy"),
    "tokenprune.policies.base": ("Policy", "PolicyView"),
    "tokenprune_bench.recommend.recommendation": ("recommend", "Recommendation"),
    "tokenprune_bench.profiling.model": ("demo_model",),
    "tokenprune_bench.show.side_by_side": ("plot",),
    "tokenprune.cost.draft": ("DraftCost",),
    "tokenprune.registry": ("available_methods", "method_info", "register", "MethodInfo"),
    "tokenprune.budget": ("Budget",),
    "tokenprune.guard.settings": ("Guard",),
    "tokenprune.statistics": ("Stats", "Cut", "Removal", "Guarded", "FeatureCacheCounts"),
    "tokenprune.base": (
        "Method",
        "Pruner",
        "ResizeMethod",
        "ImageChooser",
        "AttentionPattern",
        "Selection",
        "Site",
    ),
    "tokenprune.integrations.hf.encoded.feature_cache": ("FeatureCache",),
    "tokenprune.sites.decode": ("DecodeMethod",),
    "tokenprune.view.observable": ("Observable",),
    "tokenprune.view.registry": ("available_observables", "register_observable"),
    "tokenprune.sites.encoder": ("EncoderMethod", "Tower"),
    "tokenprune_bench.calibration.run": ("calibrate",),
    "tokenprune.methods.encoder.thresholds": ("Thresholds",),
    "tokenprune.view.source": ("TokenSource",),
    "tokenprune.view.tokens": ("VisualTokens",),
    "tokenprune.sites.frames": ("FrameMerger", "FrameMix"),
    "tokenprune.sites.units": ("UnitDropper",),
    "tokenprune.methods.video.base": ("VideoPruner",),
    "tokenprune.view.videos": ("Videos",),
    "tokenprune.shapes.token_counts": ("count_visual_tokens",),
    "tokenprune_bench.calibration.rate_fitting": ("fit_dyrate",),
    "tokenprune_bench.calibration.attention_fitting": ("fit_d2pruner", "fit_fitprune"),
    "tokenprune.config": ("Config", "read_config", "write_config"),
    "tokenprune.errors": (
        "TokenPruneError",
        "UnknownMethodError",
        "UnknownPolicyError",
        "SessionError",
        "UnsupportedModelError",
        "UnsupportedSetupError",
        "BudgetError",
        "OptionError",
        "RegistrationError",
        "AlreadyPatchedError",
        "NotPatchedError",
        "PlaceholderMismatchError",
        "ConfigError",
        "ConformanceError",
        "MissingPackageError",
    ),
}
# These change only after a deprecation; all others are experimental (docs/reference/stability.md).
_STABLE = frozenset(
    "patch unpatch patched is_patched stats method available_methods method_info register Budget Stats "
    "Config read_config write_config Method Pruner Selection VisualTokens Site MethodInfo".split()
) | {*_HOMES["tokenprune.errors"]}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

if TYPE_CHECKING:
    from tokenprune.api import feature_cache, is_patched, method, patch, patched, stats, unpatch
    from tokenprune.base import AttentionPattern, ImageChooser, Method, Pruner, ResizeMethod, Selection, Site
    from tokenprune.budget import Budget
    from tokenprune.config import Config, read_config, write_config
    from tokenprune.cost.draft import DraftCost
    from tokenprune.errors import *  # noqa: F403
    from tokenprune.guard.settings import Guard
    from tokenprune.integrations.hf.encoded.feature_cache import FeatureCache
    from tokenprune.methods.encoder.thresholds import Thresholds
    from tokenprune.methods.video.base import VideoPruner
    from tokenprune.policies.base import Policy, PolicyView
    from tokenprune.policies.registry import available_policies, policy, register_policy
    from tokenprune.registry import MethodInfo, available_methods, method_info, register
    from tokenprune.shapes.token_counts import count_visual_tokens
    from tokenprune.sites.decode import DecodeMethod
    from tokenprune.sites.encoder import EncoderMethod, Tower
    from tokenprune.sites.frames import FrameMerger, FrameMix
    from tokenprune.sites.units import UnitDropper
    from tokenprune.statistics import Cut, FeatureCacheCounts, Guarded, Removal, Stats
    from tokenprune.view.observable import Observable
    from tokenprune.view.registry import available_observables, register_observable
    from tokenprune.view.source import TokenSource
    from tokenprune.view.tokens import VisualTokens
    from tokenprune.view.videos import Videos
    from tokenprune.workflows.drafts import assistant
    from tokenprune.workflows.frame_weights import frame_weights
    from tokenprune.workflows.processors import patch_processor, unpatch_processor
    from tokenprune.workflows.session import Session, session
    from tokenprune.workflows.session_results import Answer, HeldEntries, SessionStats
    from tokenprune.workflows.two_pass import Escalation, escalate


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'tokenprune' has no attribute {name!r}")
    home = _HOME_OF[name]
    module = importlib.import_module(home) if home.startswith("tokenprune.") else require(home, f"tokenprune.{name}")
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])


__all__ = ["__version__", *_HOME_OF]
