# SPDX-License-Identifier: Apache-2.0
"""What the speed benchmarks share: models with random weights, clocks, peak memory, JSON lines."""

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
from rows import Load, Rows, add_options, quiet, read, write  # noqa: F401 - the scripts have them from here
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
BEFORE, AFTER = 32, 32  # text tokens on either side of the images

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
    # As large as two CPU cores run in seconds, and still nearly all of the model.
    "100m": dict(
        vocab_size=16384, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12
    ),
    # Narrow, for prompts of so many tokens that what grows with their square would show.
    "narrow": dict(vocab_size=5000, hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=2),
    "vicuna-7b": _VICUNA,
    "qwen2.5-7b": _QWEN,
}


def llava(decoder: str, device: torch.device, dtype: torch.dtype, blocks: int = 2) -> LlavaForConditionalGeneration:
    """A LLaVA with random weights whose tower, of so many blocks, is small; made on the device itself, so that 7 B take
    seconds."""
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=blocks, num_attention_heads=2, image_size=336,
        patch_size=14,
    )  # fmt: skip
    text = LlamaConfig(max_position_embeddings=2**16, **DECODERS[decoder])
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE_ID, vision_feature_layer=-1)
    return _made(LlavaForConditionalGeneration, config, device, dtype)


def qwen(
    decoder: str, device: torch.device, dtype: torch.dtype, tower: dict[str, Any] | None = None
) -> Qwen2_5_VLForConditionalGeneration:
    """A Qwen2.5-VL with random weights. tower: its sizes; without them it is small."""
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
    return _made(Qwen2_5_VLForConditionalGeneration, config, device, dtype)


def onevision(decoder: str, device: torch.device, dtype: torch.dtype) -> LlavaOnevisionForConditionalGeneration:
    """A LLaVA-OneVision with random weights and a small tower, in which each frame of a video is a row of its own."""
    vision = SiglipVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2, image_size=112,
        patch_size=14, vision_use_head=False,
    )  # fmt: skip
    config = LlavaOnevisionConfig(
        vision_config=vision, text_config=Qwen2Config(max_position_embeddings=2**16, **DECODERS[decoder]),
        image_token_id=IMAGE_ID, video_token_id=VIDEO_ID, image_grid_pinpoints=[[112, 112]],
    )  # fmt: skip
    return _made(LlavaOnevisionForConditionalGeneration, config, device, dtype)


def internvl(
    decoder: str, device: torch.device, dtype: torch.dtype, tower: dict[str, Any]
) -> InternVLForConditionalGeneration:
    """An InternVL with random weights. tower: its sizes."""
    text = dict(model_type="qwen2", max_position_embeddings=2**16, **DECODERS[decoder])
    config = InternVLConfig(vision_config=tower, text_config=text, image_token_id=IMAGE_ID)
    return _made(InternVLForConditionalGeneration, config, device, dtype)


def _made(cls: type, config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with device:
        return cls._from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def prompt(visual: int, device: torch.device, token: int = IMAGE_ID, vocabulary: int = 256) -> torch.Tensor:
    """long `[1, BEFORE + visual + AFTER]`: text on either side of `visual` placeholders."""
    ids = torch.randint(FIRST_TEXT_ID, vocabulary, (1, BEFORE + visual + AFTER), device=device)
    ids[:, BEFORE : BEFORE + visual] = token
    return ids


def encoded(features: Sequence[torch.Tensor]) -> BaseModelOutputWithPooling:
    """What `get_image_features` would return for images with these features (`[tokens, D]` each)."""
    return BaseModelOutputWithPooling(pooler_output=list(features))


@dataclass
class Clock:
    """Wall and CPU seconds of a run on `device`; the CPU's are of all threads of the process, and leave out what other
    work on the machine takes (with GOMP_SPINCOUNT=0, which keeps waiting out of them)."""

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
    """Bytes that the peak of memory rises by inside a `with` block; on the CPU that of the process, on Linux alone."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes = device, 0

    def __enter__(self) -> Peak:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
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
    """Notes the most bytes that tensors made inside a `with` block hold at once, and how many of them are of each kind.
    What an operation takes for itself while it runs is not seen.

    kind_of: names the kind of a tensor that takes memory of its own.
    """

    def __init__(self, kind_of: Callable[[torch.Tensor], str] = lambda tensor: "all") -> None:
        super().__init__()
        self.bytes, self.kinds = 0, {}
        self._kind_of, self._now = kind_of, Counter()
        self._users: dict[int, int] = {}
        self._kinds: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(one) for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor) and id(one) not in before:
                self._add(one)
        return made

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place in self._users:
            self._users[place] += 1
        elif tensor._is_view():  # of what was there before
            return
        else:
            self._users[place], kind = 1, self._kind_of(tensor)
            self._kinds[place] = kind
            self._now[kind] += size
            if (now := self._now.total()) > self.bytes:
                self.bytes, self.kinds = now, {one: held for one, held in self._now.items() if held}
        weakref.finalize(tensor, self._drop, place, size)

    def _drop(self, place: int, size: int) -> None:
        self._users[place] -= 1
        if not self._users[place]:
            del self._users[place]
            self._now[self._kinds.pop(place)] -= size


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "cpu"


def results_path(device: torch.device, name: str, tiny: bool = False) -> Path:
    """benchmarks/results/<device>/<name>.jsonl; runs that only prove the code go to a folder of their own."""
    folder = re.sub(r"[^A-Za-z0-9.]+", "-", device_name(device)).strip("-").lower()
    return RESULTS / (f"{folder}-tiny" if tiny else folder) / f"{name}.jsonl"


def header(device: torch.device, **more: Any) -> dict[str, Any]:
    """The first line of a file of results: where, when and with what it was measured."""
    return {
        "device": device_name(device), "threads": torch.get_num_threads(), "cpus": os.cpu_count(),
        "torch": torch.__version__, "transformers": transformers.__version__, "tokenprune": tokenprune.__version__,
        "date": datetime.date.today().isoformat(),
        # Other work on the machine shows in the load: a reader can tell which times to trust.
        "load": round(os.getloadavg()[0], 2), **more,
    }  # fmt: skip


def code_version() -> str:
    """Twelve hexadecimal digits that tell the library's code from other versions of it."""
    digest = hashlib.sha256()
    package = Path(tokenprune.__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def fill_page(page: Path, begin: str, end: str, text: str) -> None:
    """Write `text` between two marks of a page, in place of what stands there."""
    head, _, rest = page.read_text().partition(begin)
    page.write_text(f"{head}{begin}\n\n{text.strip()}\n\n{end}{rest.partition(end)[2]}")


def ladder(values: Sequence[float]) -> dict[str, float]:
    """p20, p50 and p80."""
    from tokenprune_bench.profiling.timing import compute_quantiles

    return compute_quantiles(values)
