# SPDX-License-Identifier: Apache-2.0
"""Split rows with several samples into one row per sample, and join the output into the caller's rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.call import Call, RestoreOutput
from tokenprune.integrations.hf.forward.part import Part
from tokenprune.integrations.hf.sequence.packing import BORDER_ARGUMENTS, PackedRows, find_samples


class PackedCalls(Part):
    """Runs each sample of a packed row as its own row."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__()
        self.adapter = adapter
        self.owner = getattr(adapter.base, "_orig_mod", adapter.base)  # of torch.compile

    def before_call(self, call: Call, arguments: dict[str, Any]) -> tuple[dict[str, Any], RestoreOutput] | None:
        if self.owner.training:
            return self._split(arguments)
        for name in BORDER_ARGUMENTS:
            if call.arguments.get(name) is not None:
                return self._split(arguments)
        return None

    def _split(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], RestoreOutput] | None:
        """Return arguments with one row per sample, or None if each row is one sample.

        Raises:
            UnsupportedSetupError: If an argument does not work with rows of several samples.
        """
        base, tokens = self.adapter.base, arguments.get("input_ids")
        tokens = arguments.get("inputs_embeds") if tokens is None else tokens
        images = [arguments[name] for name in arguments if name.startswith(("pixel_values", "mm_encoder"))]
        if tokens is None or all(pixels is None for pixels in images):  # Q-Formers have merged the images already
            return None
        mrope = hasattr(base, "get_rope_index")
        sample = find_samples(arguments, (tokens.shape[0], tokens.shape[1]), mrope, base.training)
        if sample is None:
            return None
        few = arguments.get("logits_to_keep")
        unmet = {
            compat.CACHE: compat.get_cache(arguments) is not None,
            "output_attentions": arguments.get("output_attentions", self.adapter.text_config.output_attentions),
            # A base with its own head would compute logits of the last tokens of each sample.
            "logits_to_keep": base.get_output_embeddings() is not None and (isinstance(few, Tensor) or bool(few)),
        }
        for name in (name for name, is_set in unmet.items() if is_set):
            raise UnsupportedSetupError(
                f"{name} is not supported for rows with several samples under pruning. Leave it out, or give each "
                "sample its own row with padding."
            )
        rows = PackedRows.from_samples(sample, tokens.device)
        placeholders = set(self.adapter.placeholders.values())
        text_id = next(token for token in range(len(placeholders) + 1) if token not in placeholders)
        return rows.split(arguments, text_id), rows.join
