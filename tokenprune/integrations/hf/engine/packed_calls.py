# SPDX-License-Identifier: Apache-2.0
"""Split rows that hold several samples: inside the model each sample is a row, and the output has the caller's rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.call import Call, RestoreOutput
from tokenprune.integrations.hf.forward.part import Part
from tokenprune.integrations.hf.sequence.packing import TELLING, PackedRows, samples_of


class PackedCalls(Part):
    """Part of patches that may remove tokens."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__()
        self.adapter = adapter
        self.owner = getattr(adapter.base, "_orig_mod", adapter.base)  # of torch.compile

    def before_call(self, call: Call, arguments: dict[str, Any]) -> tuple[dict[str, Any], RestoreOutput] | None:
        if self.owner.training:
            return self._split(arguments)
        for name in TELLING:
            if call.arguments.get(name) is not None:
                return self._split(arguments)
        return None

    def _split(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], RestoreOutput] | None:
        """Return arguments in which each sample is a row, or None if each row is one sample.

        Raises:
            UnsupportedSetupError: If an argument does not work with rows of several samples.
        """
        base, tokens = self.adapter.base, arguments.get("input_ids")
        tokens = arguments.get("inputs_embeds") if tokens is None else tokens
        images = [arguments[name] for name in arguments if name.startswith(("pixel_values", "mm_encoder"))]
        if tokens is None or all(one is None for one in images):  # those of Q-Formers were merged before
            return None
        mrope = hasattr(base, "get_rope_index")
        sample = samples_of(arguments, (tokens.shape[0], tokens.shape[1]), mrope, base.training)
        if sample is None:
            return None
        few = arguments.get("logits_to_keep")
        unmet = {
            compat.CACHE: compat.get_cache(arguments) is not None,
            "output_attentions": arguments.get("output_attentions", self.adapter.text_config.output_attentions),
            # A base that is the head as well would make logits of the last tokens of each sample.
            "logits_to_keep": base.get_output_embeddings() is not None and (isinstance(few, Tensor) or bool(few)),
        }
        for name in (name for name, given in unmet.items() if given):
            raise UnsupportedSetupError(
                f"rows that hold several samples take no {name} under pruning: leave it out, or give each sample a row "
                "of its own with padding"
            )
        rows = PackedRows.of(sample, tokens.device)
        taken = set(self.adapter.placeholders.values())
        text_id = next(number for number in range(len(taken) + 1) if number not in taken)
        return rows.split(arguments, text_id), rows.join
