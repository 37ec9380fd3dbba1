# SPDX-License-Identifier: Apache-2.0
"""Notice pictures that were encoded for a prompt and then never reached the model."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.attachable import states
from tokenprune.integrations.hf.adapters import Adapter
from tokenprune.integrations.hf.part import Part

if TYPE_CHECKING:
    from tokenprune.integrations.hf.call import Call


class LostPictures(Part):
    """Raises UnsupportedSetupError where `generate` encodes pictures and then leaves them out of the prompt's forward.

    transformers 5.19 and 5.23 do so, without a word, when `prefill_chunk_size` is set: the answer knows nothing of the
    picture, and there would be nothing to prune.
    """

    def __init__(self, adapter: Adapter) -> None:
        super().__init__()
        self.adapter = adapter

    @property
    def _key(self) -> tuple[str, int]:
        return "encoded ahead", id(self)

    def _attach(self) -> None:
        # There is nothing to hook: the engine tells all there is to know.
        self._undo.append(self._forget)

    def _forget(self) -> None:
        states().pop(self._key, None)

    def note(self, modality: str, arguments: dict[str, Any], output: Any) -> None:
        if self.current() is None:  # ahead of any forward, as `generate` does
            states()[self._key] = weakref.ref(output)

    def enter(self, call: Call, kwargs: dict[str, Any]) -> None:
        ahead = states().get(self._key)
        if ahead is None:
            return
        if call.outputs or ahead() is None:
            self._forget()
        elif any(bool(mask.any()) for mask in self.adapter.visual_mask(call.arguments).values()):
            raise UnsupportedSetupError(
                "pictures were encoded, but the prompt's forward holds only their placeholders: this version of "
                "transformers loses pictures when generate() is given prefill_chunk_size; leave it out"
            )
