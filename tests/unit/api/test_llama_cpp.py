# SPDX-License-Identifier: Apache-2.0
"""`tokenprune.llama_cpp` with a fake library: the rows, positions and counts that reach the decoder, and refusals.

tests/llama_cpp compares it with transformers in the real llama.cpp (`dev/check llama-cpp`).
"""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tokenprune
from tokenprune.errors import MissingPackageError, NotPatchedError, UnsupportedModelError, UnsupportedSetupError
from tokenprune.integrations import llama_cpp

IMAGE, AUDIO = 1, 2
GRID, WIDTH, EXTRA = (4, 6), 8, 4  # EXTRA columns are features for deeper layers
COUNT = GRID[0] * GRID[1]
ROWS = np.random.default_rng(0).normal(size=(COUNT, WIDTH + EXTRA)).astype("float32")


class Position(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in "txyz"]


class FakeModule:
    """The functions of mtmd that the proxy calls, for one image."""

    MTMD_INPUT_CHUNK_TYPE_IMAGE, MTMD_INPUT_CHUNK_TYPE_AUDIO = IMAGE, AUDIO
    mtmd_decoder_pos = Position
    kind, is_bidirectional = IMAGE, False

    def __init__(self) -> None:
        self.num_unpatched_calls = 0

    def __getattr__(self, name: str) -> Any:
        results = {
            "mtmd_input_chunks_init": None, "mtmd_input_chunk_get_type": self.kind, "mtmd_encode_chunk": 0,
            "mtmd_input_chunk_get_n_tokens": COUNT, "mtmd_input_chunk_get_tokens_image": None,
            "mtmd_image_tokens_get_ny": GRID[0], "mtmd_image_tokens_get_nx": GRID[1],
            "mtmd_input_chunk_get_n_pos": max(GRID), "mtmd_decode_use_non_causal": self.is_bidirectional,
            "mtmd_get_output_embd": ROWS.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
        }  # fmt: skip
        if name not in results:
            raise AttributeError(name)
        return lambda *arguments: results[name]

    def mtmd_helper_eval_chunk_single(self, *arguments: Any) -> int:
        self.num_unpatched_calls += 1
        return 0

    def mtmd_helper_image_get_decoder_pos(self, image: Any, start: int, out: Any) -> None:
        for row in range(COUNT):
            out[row] = Position(start, start + row % GRID[1], start + row // GRID[1], 0)


class FakeLibrary(SimpleNamespace):
    """Functions of llama.cpp. `decoded` records (rows, positions) of each batch, `causal` the mask settings."""

    LLAMA_ROPE_TYPE_MROPE, LLAMA_ROPE_TYPE_IMROPE = 8, 40
    llama_seq_id = llama_pos = ctypes.c_int32

    def __init__(self, rope: int = 8) -> None:
        super().__init__(decoded=[], causal=[], code=0)
        self.llama_model_rope_type = lambda model: rope
        self.llama_model_is_recurrent = self.llama_model_is_hybrid = lambda model: False
        self.llama_model_n_embd, self.llama_model_n_embd_inp = lambda model: WIDTH, lambda model: WIDTH + EXTRA
        self.llama_batch = SimpleNamespace
        self.axes = 4 if rope == 8 else 1

    def llama_set_causal_attn(self, context: Any, causal: bool) -> None:
        self.causal.append(causal)

    def llama_decode(self, context: Any, batch: Any) -> int:
        count = batch.n_tokens
        rows = np.ctypeslib.as_array(batch.embd, (count, WIDTH + EXTRA)).copy()
        self.decoded.append((rows, np.ctypeslib.as_array(batch.pos, (self.axes, count)).copy()))
        assert list(batch.n_seq_id) == [1] * count and all(batch.seq_id[row][0] == 0 for row in range(count))
        return self.code


def build(monkeypatch: pytest.MonkeyPatch, rope: int = 8) -> tuple[Any, FakeLibrary]:
    library = FakeLibrary(rope)
    monkeypatch.setattr(llama_cpp, "_load_library", lambda: library)
    handler = SimpleNamespace(_mtmd_cpp=FakeModule())
    return SimpleNamespace(chat_handler=handler, model=None, metadata={"general.architecture": "some"}), library


def evaluate(llm: Any, start: int = 5, n_batch: int = 64) -> tuple[int, int]:
    """Evaluate the image as a chat handler does. Return the code and the next position."""
    end = ctypes.c_int32(0)
    proxy = llm.chat_handler._mtmd_cpp
    proxy.mtmd_input_chunks_init()
    code = proxy.mtmd_helper_eval_chunk_single(
        None, None, "chunk", ctypes.c_int32(start), 0, n_batch, False, ctypes.byref(end)
    )
    return code, end.value


@pytest.mark.parametrize("method", ["divprune", "pool"])
@pytest.mark.parametrize("n_batch", [64, 4])
def test_kept_rows_reach_the_decoder_at_their_positions(
    method: str, n_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features for deeper layers are merged like the others."""
    llm, library = build(monkeypatch)
    tokenprune.llama_cpp.patch(llm, method, keep=6)
    assert evaluate(llm, n_batch=n_batch) == (0, 5 + max(GRID))
    expected = tokenprune.reduce(torch.tensor(ROWS[:, :WIDTH]), method, keep=6, grid=GRID)
    rows, positions = (np.concatenate(part, axis) for axis, part in enumerate(zip(*library.decoded, strict=True)))
    np.testing.assert_array_equal(rows, expected.apply(ROWS))
    np.testing.assert_array_equal(rows[:, :WIDTH], expected.features.numpy())
    axes = [[5, 5 + row // GRID[1], 5 + row % GRID[1], 0] for row in expected.kept.tolist()]
    assert positions.T.tolist() == axes and len(library.decoded) == -(-6 // n_batch)
    stats = tokenprune.llama_cpp.stats(llm)
    assert (stats.visual_tokens_in, stats.visual_tokens_out, stats.keep_ratio) == (COUNT, 6, 0.25)
    assert llm.chat_handler._mtmd_cpp.mtmd_input_chunk_get_n_tokens("chunk") == 6 and not library.causal


def test_other_models_number_the_kept_rows_consecutively(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, library = build(monkeypatch, rope=2)
    with pytest.raises(UnsupportedSetupError, match="no gaps in the positions of some"):
        tokenprune.llama_cpp.patch(llm, "divprune", keep=6)
    tokenprune.llama_cpp.patch(llm, "divprune", keep=6, positions="renumbered")
    assert evaluate(llm) == (0, 11)
    assert library.decoded[0][1].tolist() == [[5, 6, 7, 8, 9, 10]]


def test_rows_that_attend_to_each_other_are_decoded_without_a_causal_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask is restored after an error too."""
    llm, library = build(monkeypatch)
    monkeypatch.setattr(FakeModule, "is_bidirectional", True)
    tokenprune.llama_cpp.patch(llm, "divprune", keep=6)
    library.code = 1
    assert evaluate(llm)[0] == 1 and library.causal == [False, True]
    assert tokenprune.llama_cpp.stats(llm).visual_tokens_out == 0


def test_all_tokens_take_the_path_of_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, library = build(monkeypatch)
    tokenprune.llama_cpp.patch(llm, "divprune", keep=1.0)
    module = llm.chat_handler._mtmd_cpp.module
    assert evaluate(llm)[0] == 0 and module.num_unpatched_calls == 1 and not library.decoded
    assert tokenprune.llama_cpp.unpatch(llm).chat_handler._mtmd_cpp is module
    with pytest.raises(NotPatchedError):
        tokenprune.llama_cpp.stats(llm)


def test_requests_that_llama_cpp_cannot_serve_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModelError, match="lacks a chat handler that reads images"):
        tokenprune.llama_cpp.patch(SimpleNamespace(chat_handler=None))
    llm, library = build(monkeypatch)
    with pytest.raises(UnsupportedSetupError, match="vscan needs decoder, question, tower_attention, which"):
        tokenprune.llama_cpp.patch(llm, "vscan")
    with monkeypatch.context() as context:
        context.setattr(library, "llama_model_is_recurrent", lambda model: True)
        with pytest.raises(UnsupportedModelError, match="recurrent layers"):
            tokenprune.llama_cpp.patch(llm)
    assert isinstance(llm.chat_handler._mtmd_cpp, FakeModule)
    tokenprune.llama_cpp.patch(llm)
    monkeypatch.setattr(FakeModule, "kind", AUDIO)
    with pytest.raises(UnsupportedSetupError, match="contains audio"):
        llm.chat_handler._mtmd_cpp.mtmd_input_chunk_get_n_tokens("chunk")


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    handler = SimpleNamespace(_mtmd_cpp=FakeModule())
    with pytest.raises(MissingPackageError, match="pip install llama-cpp-python"):
        tokenprune.llama_cpp.patch(SimpleNamespace(chat_handler=handler, metadata={}))
