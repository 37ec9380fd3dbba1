# SPDX-License-Identifier: Apache-2.0
"""Find the adapter for a model among those that are registered."""

from __future__ import annotations

from torch import nn

from tokenprune.errors import UnsupportedModelError
from tokenprune.families import REFUSED, SUPPORTED, UNCUT
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.families.base import ADAPTERS, Adapter, how_to_add
from tokenprune.integrations.hf.families.retrieval import whole_model
from tokenprune.integrations.shared.versions import check_tested


def adapter_for(model: nn.Module) -> Adapter:
    """Return an adapter for `model`.

    Raises UnsupportedModelError with what is supported and how to add a family, and UnsupportedSetupError with a
    transformers that is newer than those tested.
    """
    model = whole_model(model)
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind is None and type(model).__name__ in ("DataParallel", "DistributedDataParallel"):
        raise UnsupportedModelError(
            f"{type(model).__name__} wraps the model: patch .module before wrapping, as in "
            "DistributedDataParallel(tokenprune.patch(model, ...)), and ask stats and unpatch of .module too"
        )
    if kind is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a transformers model (it has no config.model_type). {how_to_add()}"
        )
    check_tested("transformers", str(compat.VERSION), compat.NEWEST)
    if kind in SUPPORTED and compat.lacks(SUPPORTED[kind].since):
        raise UnsupportedModelError(
            f"model type {kind!r} can be pruned from transformers {SUPPORTED[kind].since} on, and this is transformers "
            f"{compat.VERSION}: pip install 'transformers>={SUPPORTED[kind].since}'"
        )
    if kind in REFUSED and kind not in UNCUT and kind not in ADAPTERS:
        raise UnsupportedModelError(f"model type {kind!r} is not supported: {REFUSED[kind]}. {how_to_add()}")
    return ADAPTERS.get(kind, Adapter)(model)
