# SPDX-License-Identifier: Apache-2.0
"""Shared helpers of the speed benchmarks: models with random weights, clocks, peak memory, JSON lines."""

from __future__ import annotations

import datetime
import hashlib
import os
import re
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import calm_threads  # noqa: F401
import torch
import transformers
from rows import Load, Rows, add_options, quiet, read, write  # noqa: F401 - re-exported for the scripts
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    CLIPVisionConfig,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    SiglipVisionConfig,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling

import tokenprune

RESULTS = Path(__file__).parents[1] / "results"
IMAGE_ID, VIDEO_ID, FIRST_TEXT_ID = 5, 6, 16
BEFORE, AFTER = 32, 32  # text tokens before and after the images

_VICUNA = dict(
    vocab_size=32064, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32
)
_QWEN = dict(
    vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
    num_key_value_heads=4,
)  # fmt: skip
DECODERS: dict[str, dict[str, int]] = {
    "tiny": dict(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
    # The largest decoder that two CPU cores run in seconds while it still dominates the model.
    "100m": dict(
        vocab_size=16384, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12
    ),
    # Narrow, for long prompts: quadratic costs show here.
    "narrow": dict(vocab_size=5000, hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=2),
    "vicuna-7b": _VICUNA,
    "qwen2.5-7b": _QWEN,
}


def llava(decoder: str, device: torch.device, dtype: torch.dtype, blocks: int = 2) -> LlavaForConditionalGeneration:
    """Build a LLaVA with random weights on the device. Its small vision tower has `blocks` blocks."""
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=blocks, num_attention_heads=2, image_size=336,
        patch_size=14,
    )  # fmt: skip
    text = LlamaConfig(max_position_embeddings=2**16, **DECODERS[decoder])
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE_ID, vision_feature_layer=-1)
    return _build_model(LlavaForConditionalGeneration, config, device, dtype)


def qwen(
    decoder: str, device: torch.device, dtype: torch.dtype, tower: dict[str, Any] | None = None
) -> Qwen2_5_VLForConditionalGeneration:
    """Build a Qwen2.5-VL with random weights. `tower` holds the sizes of the vision tower, small by default."""
    shape = DECODERS[decoder]
    width = shape["hidden_size"] // shape["num_attention_heads"]
    section = [width // 8, width // 2 - width // 8 - width // 4 + width // 16, width // 4 - width // 16]
    text = dict(
        max_position_embeddings=2**16, pad_token_id=0, bos_token_id=None, eos_token_id=None,
        rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=section), **shape,
    )  # fmt: skip
    vision = dict(
        depth=2, num_heads=2, hidden_size=32, intermediate_size=64, patch_size=4, window_size=16,
        fullatt_block_indexes=[1],
    )  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config={**(tower or vision), "out_hidden_size": shape["hidden_size"]},
        image_token_id=IMAGE_ID,
        video_token_id=VIDEO_ID,
        vision_start_token_id=7,
    )
    return _build_model(Qwen2_5_VLForConditionalGeneration, config, device, dtype)


def onevision(decoder: str, device: torch.device, dtype: torch.dtype) -> LlavaOnevisionForConditionalGeneration:
    """Build a LLaVA-OneVision with random weights and a small tower.

    Each frame of a video is a row of the tower's batch.
    """
    vision = SiglipVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2, image_size=112,
        patch_size=14, vision_use_head=False,
    )  # fmt: skip
    config = LlavaOnevisionConfig(
        vision_config=vision, text_config=Qwen2Config(max_position_embeddings=2**16, **DECODERS[decoder]),
        image_token_id=IMAGE_ID, video_token_id=VIDEO_ID, image_grid_pinpoints=[[112, 112]],
    )  # fmt: skip
    return _build_model(LlavaOnevisionForConditionalGeneration, config, device, dtype)


def internvl(
    decoder: str, device: torch.device, dtype: torch.dtype, tower: dict[str, Any]
) -> InternVLForConditionalGeneration:
    """Build an InternVL with random weights. `tower` holds the sizes of the vision tower."""
    text = dict(model_type="qwen2", max_position_embeddings=2**16, **DECODERS[decoder])
    config = InternVLConfig(vision_config=tower, text_config=text, image_token_id=IMAGE_ID)
    return _build_model(InternVLForConditionalGeneration, config, device, dtype)


def _build_model(cls: type, config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with device:
        return cls._from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def prompt(visual: int, device: torch.device, token: int = IMAGE_ID, vocabulary: int = 256) -> torch.Tensor:
    """Return random token ids, shape (1, BEFORE + visual + AFTER): text, `visual` placeholders, text."""
    ids = torch.randint(FIRST_TEXT_ID, vocabulary, (1, BEFORE + visual + AFTER), device=device)
    ids[:, BEFORE : BEFORE + visual] = token
    return ids


def encoded(features: Sequence[torch.Tensor]) -> BaseModelOutputWithPooling:
    """Return `get_image_features` output for images with the given features, shape (tokens, hidden) each."""
    return BaseModelOutputWithPooling(pooler_output=list(features))


@dataclass
class Clock:
    """Measure wall and CPU seconds of a run on `device`.

    CPU seconds are of all threads of this process, so other work on the machine does not count. Set GOMP_SPINCOUNT=0 to
    exclude waiting threads.
    """

    device: torch.device

    def __call__(self, run: Callable[[], Any]) -> tuple[float, float]:
        self.wait()
        start = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            run()
        self.wait()
        return time.perf_counter() - start[0], time.process_time() - start[1]

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Peak:
    """Measure the rise of peak memory inside a `with` block, in bytes. On the CPU: of the process, on Linux only."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes = device, 0

    def __enter__(self) -> Peak:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # reset the peak
            self.before = _memory("VmRSS")
        return self

    def __exit__(self, *_: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            self.bytes = torch.cuda.max_memory_allocated() - self.before
        else:
            self.bytes = max(0, _memory("VmHWM") - self.before)


def _memory(line: str) -> int:
    return next(int(x.split()[1]) for x in Path("/proc/self/status").open() if x.startswith(line)) * 1024


class Live(TorchDispatchMode):
    """Record the peak of live tensor bytes inside a `with` block, and the bytes of each kind at the peak.

    Temporary memory inside of an operation is not counted.

    Args:
        kind_of: Return the kind of a tensor that owns memory.
    """

    def __init__(self, kind_of: Callable[[torch.Tensor], str] = lambda tensor: "all") -> None:
        super().__init__()
        self.bytes, self.kinds = 0, {}
        self._kind_of, self._now = kind_of, Counter()
        self._users: dict[int, int] = {}
        self._kinds: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in before:
                self._add(leaf)
        return outputs

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._users:
            self._users[address] += 1
        elif tensor._is_view():  # of a tensor from before the block
            return
        else:
            self._users[address], kind = 1, self._kind_of(tensor)
            self._kinds[address] = kind
            self._now[kind] += size
            if (now := self._now.total()) > self.bytes:
                self.bytes, self.kinds = now, {name: size for name, size in self._now.items() if size}
        weakref.finalize(tensor, self._drop, address, size)

    def _drop(self, address: int, size: int) -> None:
        self._users[address] -= 1
        if not self._users[address]:
            del self._users[address]
            self._now[self._kinds.pop(address)] -= size


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "cpu"


def results_path(device: torch.device, name: str, tiny: bool = False) -> Path:
    """Return benchmarks/results/DEVICE/NAME.jsonl. Trial runs (`tiny`) have a separate folder."""
    folder = re.sub(r"[^A-Za-z0-9.]+", "-", device_name(device)).strip("-").lower()
    return RESULTS / (f"{folder}-tiny" if tiny else folder) / f"{name}.jsonl"


def header(device: torch.device, **more: Any) -> dict[str, Any]:
    """Return the first line of a results file: device, versions, date and load."""
    return {
        "device": device_name(device), "threads": torch.get_num_threads(), "cpus": os.cpu_count(),
        "torch": torch.__version__, "transformers": transformers.__version__, "tokenprune": tokenprune.__version__,
        "date": datetime.date.today().isoformat(),
        # The load shows other work on the machine, so that readers can judge the times.
        "load": round(os.getloadavg()[0], 2), **more,
    }  # fmt: skip


def code_version() -> str:
    """Return the first twelve hexadecimal digits of a hash of the library's code."""
    digest = hashlib.sha256()
    package = Path(tokenprune.__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def fill_page(page: Path, begin: str, end: str, text: str) -> None:
    """Write `text` between two markers of a page."""
    head, _, rest = page.read_text().partition(begin)
    page.write_text(f"{head}{begin}\n\n{text.strip()}\n\n{end}{rest.partition(end)[2]}")


def ladder(values: Sequence[float]) -> dict[str, float]:
    from tokenprune_bench.profiling.timing import compute_quantiles

    return compute_quantiles(values)
