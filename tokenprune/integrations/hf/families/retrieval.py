# SPDX-License-Identifier: Apache-2.0
"""Models that return a vector for each token of a page or a question (ColPali and its kin)."""

from __future__ import annotations

import gc
import sys

from torch import nn

from tokenprune.errors import UnsupportedModelError

_CLASSES = {
    "colpali": "ColPaliForRetrieval",
    "colqwen2": "ColQwen2ForRetrieval",
    "colmodernvbert": "ColModernVBertForRetrieval",
}


def whole_model(model: nn.Module) -> nn.Module:
    """Return the retrieval model whose `vlm` this is, and `model` itself where there is none.

    A module does not know what holds it, and what the outer model makes of dropped tokens does not show inside. Raises
    UnsupportedModelError for models of colpali-engine, which go on with what is left as if nothing had been dropped.
    """
    if hasattr(model, "custom_text_proj"):
        raise UnsupportedModelError(
            f"{type(model).__name__} makes a vector of every token itself, of dropped ones too: load the checkpoint in "
            "transformers' format (vidore/colpali-v1.3-hf, vidore/colqwen2-v1.0-hf) as ColPaliForRetrieval or "
            "ColQwen2ForRetrieval"
        )
    places = {name: sys.modules.get(f"transformers.models.{name}.modeling_{name}") for name in _CLASSES}
    classes = tuple(vars(place)[_CLASSES[name]] for name, place in places.items() if place is not None)
    if not classes:  # so that none of them can be there
        return model
    holders = (one for one in gc.get_objects() if issubclass(type(one), classes))
    return next((one for one in holders if one._modules.get("vlm") is model), model)
