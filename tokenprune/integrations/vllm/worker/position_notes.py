# SPDX-License-Identifier: Apache-2.0
"""Worker: table of the positions of each item's rows, by request and offset of the item in the prompt.

The model computes the notes when a request arrives. The runner needs them when it writes the positions of rows. vLLM
may rebuild an item's object in between, as `EncoderCache.update_encoder_inputs` of 0.33 does, so the notes are not
stored on it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.vllm.compat import TESTED, vllm_version

# Offset of an item in the prompt -> int64 tensor (2, rows): the index of each row in the prompt, and the position that
# its columns are relative to. None for an item that keeps all tokens.
ItemNotes = Mapping[int, Tensor | None]


class PositionNotes:
    """The notes of all requests of a worker."""

    def __init__(self) -> None:
        self._of_request: dict[Hashable, ItemNotes] = {}
        self._arriving: Hashable = None

    @contextmanager
    def recording(self, request: Hashable, live: Container[Hashable] | None = None) -> Iterator[None]:
        """Within the context, `record` stores the notes of this request.

        Args:
            request: Key of the request: its id on Model Runner V1, its row in the state on V2.
            live: Keys of the requests that still run; notes of all others are dropped. None keeps all notes, for keys
                that later requests reuse.
        """
        if live is not None:
            self._of_request = {key: notes for key, notes in self._of_request.items() if key in live}
        self._of_request.pop(request, None)
        self._arriving = request
        try:
            yield
        finally:
            self._arriving = None

    def record(self, notes: ItemNotes) -> None:
        """Store the notes for the request of `recording`. Outside of this context they are discarded."""
        if self._arriving is not None:
            self._of_request[self._arriving] = notes

    def get(self, request: Hashable) -> ItemNotes:
        """Return the notes of a request, or an empty mapping."""
        return self._of_request.get(request, {})


def create_missing_note_error(offset: int) -> UnsupportedSetupError:
    """Return the error for an item without an entry in the notes of its request."""
    return UnsupportedSetupError(
        f"vLLM {vllm_version()} computed no positions for the item at token {offset} of a request. "
        f"Use the tested version, {TESTED}."
    )


def wrap_init_v1(original: Any) -> Callable[..., Any]:
    """Wrap `GPUModelRunner._init_mrope_positions` so that the model's `ItemNotes` are stored under the request's id."""

    def _init_mrope_positions(self: Any, req_state: Any) -> Any:
        notes = getattr(self.get_model(), "tokenprune_notes", None)
        if notes is None:
            return original(self, req_state)
        with notes.recording(req_state.req_id, self.requests):
            return original(self, req_state)

    return _init_mrope_positions


def wrap_init_v2(original: Any) -> Callable[..., Any]:
    """Wrap `RopeState.init_prefill_positions` so that the model's `ItemNotes` are stored under the row `req_idx`."""

    def init_prefill_positions(self: Any, req_idx: int, model: Any, *args: Any, **kwargs: Any) -> Any:
        notes = getattr(model, "tokenprune_notes", None)
        if notes is None:
            return original(self, req_idx, model, *args, **kwargs)
        with notes.recording(req_idx):
            return original(self, req_idx, model, *args, **kwargs)

    return init_prefill_positions
