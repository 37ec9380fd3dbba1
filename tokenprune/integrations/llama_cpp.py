# SPDX-License-Identifier: Apache-2.0
"""Prune the visual tokens of llama.cpp models, in the chat handlers of llama-cpp-python.

    llm = Llama(model_path=..., chat_handler=MTMDChatHandler(clip_model_path=...), n_ctx=1024)
    tokenprune.llama_cpp.patch(llm, "divprune", keep=0.25)

A chat handler calls the C library through its attribute `_mtmd_cpp`. The patch replaces this module by a proxy that
encodes an image, reduces its rows with `tokenprune.reduce`, and decodes only the kept rows.
"""

from __future__ import annotations

import ctypes
import importlib
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokenprune.budgets import Budget
from tokenprune.errors import (
    AlreadyPatchedError,
    BudgetError,
    MissingPackageError,
    NotPatchedError,
    OptionError,
    UnsupportedModelError,
    UnsupportedSetupError,
)
from tokenprune.integrations.reduction import ReducedImage, find_stage, read_method, reduce, resolve_budget
from tokenprune.selection.inputs import list_inputs
from tokenprune.selection.method import Method, Pruner
from tokenprune.selection.observable import Input
from tokenprune.selection.segments import square_grid
from tokenprune.settings.arguments import read_budgets
from tokenprune.statistics import Stats

__all__ = ["patch", "stats", "unpatch"]

# Functions of llama-cpp-python's mtmd module that the proxy calls (tested with 0.3.36).
_REQUIRED = (
    "mtmd_decode_use_non_causal", "mtmd_encode_chunk", "mtmd_get_output_embd", "mtmd_helper_image_get_decoder_pos",
    "mtmd_image_tokens_get_nx", "mtmd_image_tokens_get_ny", "mtmd_input_chunk_get_n_pos",
)  # fmt: skip
_POSITIONS = ("original", "renumbered")


def patch(
    llm: Any,
    method: str | Method | None = None,
    *,
    keep: float | int | Budget | None = None,
    positions: str = "original",
    replace: bool = False,
    **options: Any,
) -> Any:
    """Prune the visual tokens of a `llama_cpp.Llama` in place, and return it.

    Args:
        llm: Model with a chat handler that reads images, such as `MTMDChatHandler`.
        method: Method that needs only the features of an image (`tokenprune methods --runs-on features`). Default:
            "divprune".
        keep: Share of the visual tokens of each image, tokens per image, or a `Budget` of these.
        positions: "original": kept tokens keep their positions, which requires a model with M-RoPE (Qwen-VL, GLM-V).
            "renumbered": kept tokens are numbered consecutively, for all other models. Answers about locations
            in the image may change.
        replace: Replace an existing patch instead of raising an error.
        options: Options of the method.

    Returns:
        The model.

    Raises:
        UnsupportedModelError: If the model lacks a chat handler that reads images, or has recurrent layers.
        UnsupportedSetupError: If llama.cpp does not provide an input of the method, or the model does not support the
            positions.
        AlreadyPatchedError: If the model is patched and `replace` is False.
        OptionError, BudgetError, UnknownMethodError: If an argument is invalid.
    """
    handler = _find_handler(llm)
    configured = read_method(method, options, ("keep", "positions"))
    (budget,) = read_budgets(keep, [configured])
    if missing := sorted(list_inputs(configured) - {Input.FEATURES}):
        raise UnsupportedSetupError(
            f"{configured.name} needs {', '.join(missing)}, which llama.cpp does not provide. Use a method that "
            '`tokenprune methods --runs-on features` lists, such as "divprune".'
        )
    stage, budget = find_stage(configured, budget)
    if budget.ages is not None:
        raise BudgetError(f"{budget} reads later images of the prompt. Pass a share or a number of tokens per image.")
    _check_model(llm, positions)
    if isinstance(handler._mtmd_cpp, _PrunedModule):
        if not replace:
            raise AlreadyPatchedError("The model is already patched. Call unpatch(llm) first, or pass replace=True.")
        unpatch(llm)
    if absent := [name for name in _REQUIRED if not hasattr(handler._mtmd_cpp, name)]:
        raise UnsupportedSetupError(f"This llama-cpp-python lacks {absent[0]}. Install version 0.3.36 or newer.")
    handler._mtmd_cpp = _PrunedModule(handler._mtmd_cpp, llm, stage, budget, positions == "original")
    return llm


def unpatch(llm: Any) -> Any:
    """Remove the patch from a `llama_cpp.Llama`, and return it.

    Raises:
        NotPatchedError: If the model is not patched.
    """
    llm.chat_handler._mtmd_cpp = _find_patch(llm).module
    return llm


def stats(llm: Any) -> Stats:
    """Return the `Stats` of the last chat completion with images: token counts, and the host time of the selection.

    Raises:
        NotPatchedError: If the model is not patched.
    """
    return _find_patch(llm).stats


def _find_handler(llm: Any) -> Any:
    handler = getattr(llm, "chat_handler", None)
    if not hasattr(handler, "_mtmd_cpp"):
        raise UnsupportedModelError(
            f"This {type(llm).__name__} lacks a chat handler that reads images. Pass "
            "Llama(chat_handler=MTMDChatHandler(clip_model_path=...))."
        )
    return handler


def _find_patch(llm: Any) -> _PrunedModule:
    module = getattr(getattr(llm, "chat_handler", None), "_mtmd_cpp", None)
    if not isinstance(module, _PrunedModule):
        raise NotPatchedError(f"This {type(llm).__name__} is not patched. Call tokenprune.llama_cpp.patch(llm) first.")
    return module


def _load_library() -> Any:
    """Return the module with the functions of llama.cpp."""
    try:
        return importlib.import_module("llama_cpp.llama_cpp")
    except ImportError:
        raise MissingPackageError("tokenprune.llama_cpp: pip install llama-cpp-python") from None


def _check_model(llm: Any, positions: str) -> None:
    """Raise an error if the decoder cannot run on a part of the tokens with these positions."""
    library = _load_library()
    name = llm.metadata.get("general.architecture", "unknown")
    if positions not in _POSITIONS:
        raise OptionError(f"positions={positions!r} is invalid. Use {' or '.join(map(repr, _POSITIONS))}.")
    if library.llama_model_is_recurrent(llm.model) or library.llama_model_is_hybrid(llm.model):
        raise UnsupportedModelError(f"The decoder {name} has recurrent layers, which are not supported in llama.cpp.")
    rope = library.llama_model_rope_type(llm.model)
    has_mrope = rope in (library.LLAMA_ROPE_TYPE_MROPE, library.LLAMA_ROPE_TYPE_IMROPE)
    if has_mrope and positions == "renumbered":
        raise OptionError(f'{name} keeps the original positions exactly. Leave out positions="renumbered".')
    if not has_mrope and positions == "original":
        raise UnsupportedSetupError(
            f'llama.cpp accepts no gaps in the positions of {name}. Pass positions="renumbered"; answers about places '
            "in the image (grounding) may change."
        )


@dataclass
class _PrunedModule:
    """Proxy of the module `llama_cpp.mtmd_cpp` that decodes only the kept rows of an image.

    Attributes:
        module: The module.
        llm: The model.
        method: Method that selects rows.
        budget: Its budget.
        keeps_positions: True if kept rows keep their M-RoPE positions.
        stats: Statistics of the last prompt.
    """

    module: Any
    llm: Any
    method: Pruner
    budget: Budget
    keeps_positions: bool
    stats: Stats = field(default_factory=Stats)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def mtmd_input_chunks_init(self) -> Any:
        """Start the statistics of a prompt."""
        self.stats = Stats()
        return self.module.mtmd_input_chunks_init()

    def mtmd_input_chunk_get_n_tokens(self, chunk: Any) -> int:
        """Return the number of tokens of a chunk that the context must hold. The handler compares it with `n_ctx`."""
        count: int = self.module.mtmd_input_chunk_get_n_tokens(chunk)
        if self.module.mtmd_input_chunk_get_type(chunk) == self.module.MTMD_INPUT_CHUNK_TYPE_AUDIO:
            raise UnsupportedSetupError("This prompt contains audio, which is not pruned. Call unpatch(llm) first.")
        return resolve_budget(self.method, self.budget, [count])[0] if self._is_image(chunk) else count

    def mtmd_helper_eval_chunk_single(
        self, ctx: Any, lctx: Any, chunk: Any, n_past: Any, seq_id: Any, n_batch: Any, logits_last: Any, new_n_past: Any
    ) -> int:
        """Evaluate a chunk. Of an image, only the kept rows are decoded. Returns 0, or the error code of llama.cpp."""
        module = self.module
        if not self._is_image(chunk):
            code: int = module.mtmd_helper_eval_chunk_single(
                ctx, lctx, chunk, n_past, seq_id, n_batch, logits_last, new_n_past
            )
            return code
        count = module.mtmd_input_chunk_get_n_tokens(chunk)
        self.stats.visual_tokens_in += count
        if resolve_budget(self.method, self.budget, [count]) == [count] and not self.method.chooses_count:
            self._count_kept(count)
            code = module.mtmd_helper_eval_chunk_single(
                ctx, lctx, chunk, n_past, seq_id, n_batch, logits_last, new_n_past
            )
            return code
        if code := module.mtmd_encode_chunk(ctx, chunk):
            return code
        start = getattr(n_past, "value", n_past)
        rows, image = self._reduce(ctx, chunk, count)
        positions, end = self._find_positions(chunk, image, start)
        code = self._decode(ctx, lctx, chunk, rows, positions, getattr(n_batch, "value", n_batch))
        if code == 0:
            new_n_past._obj.value = end
            self._count_kept(len(rows))
        return code

    def _is_image(self, chunk: Any) -> bool:
        kind: int = self.module.mtmd_input_chunk_get_type(chunk)
        return kind == int(self.module.MTMD_INPUT_CHUNK_TYPE_IMAGE)

    def _count_kept(self, count: int) -> None:
        self.stats.visual_tokens_out += count
        self.stats.keep_ratio = self.stats.visual_tokens_out / self.stats.visual_tokens_in

    def _reduce(self, ctx: Any, chunk: Any, count: int) -> tuple[np.ndarray, ReducedImage]:
        """Return the kept rows of the encoded image, shape (K, width), and the selection."""
        begin, library = time.perf_counter(), _load_library()
        width = library.llama_model_n_embd_inp(self.llm.model)
        output = self.module.mtmd_get_output_embd(ctx)
        rows = np.ctypeslib.as_array(output, (count * width,)).reshape(count, width)
        # The columns behind the input of the decoder are features for deeper layers (deepstack).
        hidden = rows[:, : library.llama_model_n_embd(self.llm.model)]
        image = reduce(hidden, self.method, self.budget, grid=self._find_grid(chunk, count))
        kept = np.ascontiguousarray(image.apply(rows), np.float32)
        self.stats.notes += [note for note in image.notes if note not in self.stats.notes]
        self.stats.overhead_ms = (self.stats.overhead_ms or 0.0) + 1000 * (time.perf_counter() - begin)
        return kept, image

    def _find_grid(self, chunk: Any, count: int) -> tuple[int, ...] | None:
        """Return the grid of an image. Models without M-RoPE report one row, and resize images to squares."""
        tokens = self.module.mtmd_input_chunk_get_tokens_image(chunk)
        height, width = self.module.mtmd_image_tokens_get_ny(tokens), self.module.mtmd_image_tokens_get_nx(tokens)
        return (1, height, width) if height > 1 and height * width == count else square_grid(count)

    def _find_positions(self, chunk: Any, image: ReducedImage, start: int) -> tuple[np.ndarray, int]:
        """Return the positions of the kept rows, shape (axes, K), int32, and the position after the image."""
        if not self.keeps_positions:
            end = start + len(image.kept)
            return np.arange(start, end, dtype=np.int32)[None], end
        every = (self.module.mtmd_decoder_pos * image.count)()
        self.module.mtmd_helper_image_get_decoder_pos(
            self.module.mtmd_input_chunk_get_tokens_image(chunk), start, every
        )
        axes = [[every[row].t, every[row].y, every[row].x, every[row].z] for row in image.kept]
        return np.array(axes, np.int32).T, start + self.module.mtmd_input_chunk_get_n_pos(chunk)

    def _decode(self, ctx: Any, lctx: Any, chunk: Any, rows: np.ndarray, positions: np.ndarray, n_batch: int) -> int:
        """Decode the rows of an image in batches. Returns 0, or the error code of llama.cpp."""
        library = _load_library()
        sees_all = self.module.mtmd_decode_use_non_causal(ctx, chunk)  # Gemma 3: rows of an image attend to each other
        if sees_all:
            library.llama_set_causal_attn(lctx, False)
        try:
            for start in range(0, len(rows), n_batch):
                part = slice(start, start + n_batch)
                if code := _decode_rows(library, lctx, rows[part], positions[:, part]):
                    return code
        finally:
            if sees_all:
                library.llama_set_causal_attn(lctx, True)
        return 0


def _decode_rows(library: Any, lctx: Any, rows: np.ndarray, positions: np.ndarray) -> int:
    """Decode rows (n, width) at positions (axes, n) in sequence 0, without logits."""
    count, positions = len(rows), np.ascontiguousarray(positions)
    sequence = (library.llama_seq_id * 1)(0)
    pointers = [ctypes.cast(sequence, ctypes.POINTER(library.llama_seq_id))] * count
    batch = library.llama_batch()
    batch.n_tokens = count
    batch.embd = rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    batch.pos = positions.ctypes.data_as(ctypes.POINTER(library.llama_pos))
    batch.n_seq_id = (ctypes.c_int32 * count)(*[1] * count)
    batch.seq_id = (ctypes.POINTER(library.llama_seq_id) * (count + 1))(*pointers, None)
    batch.logits = (ctypes.c_int8 * count)()
    code: int = library.llama_decode(lctx, batch)
    return code
