# SPDX-License-Identifier: Apache-2.0
"""The cells of dev/equal_answers.py: every method and a few stacks on ten tiny families and the shipped models.

This module imports only public names of `tokenprune` and the tests' tiny models, so that it runs on other commits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from PIL import Image

import tokenprune

KEEPS = (0.4, 1.0)
STACKS = ("divprune+dart", "tome+fastv", "visionzip+pyramiddrop", "pool+dyrate", "framefusion+fastv", "pixelprune+dart")
# Settings beside the defaults, of methods whose options lead to other code, and budgets of all kinds.
OTHERS = (
    dict(method="fastv", layer=3, query="all"), dict(method="sparsevlm", version="+"),
    dict(method="v2drop", last="withdraw"), dict(method="prumerge", merge="clusters"),
    dict(method="dyrate", warmup=0, update_every=1), dict(method="dyrate", rate="schedule", schedule=[.6], mode="mask"),
    dict(method="pevlm", keep=1.0, sink_frames=1, block_frames=2), dict(method="view_select", views=("left", "right")),
    dict(method="pevlm", keep=1.0, sink_frames=1, block_frames=2, position_mode="reuse", sink_mode="text"),
    dict(method="dymu", keep=0.5), dict(method="dymu", keep=0.5, exact=True, vtu="expanded"), dict(method="tome", r=2),
    dict(method="dyrate", warmup=0, update_every=1, mode="mask", monotone=False, batch_policy="shared"),
    dict(method="divprune", keep=7), dict(method="divprune", keep=dict(keep=0.4, per="prompt")),
    dict(method="random", keep=dict(keep=0.4, per="frame")), dict(method="dart", keep=dict(average_share=0.8)),
    dict(method="fastv", keep=dict(flops_share=0.8)), dict(method="pyramiddrop", keep=dict(kv_share=0.7)),
)  # fmt: skip
# One method per kind, for the input modes other than "images" and "video". WAYS has the options of each mode.
KINDS = ("divprune", "dart", "sparsevlm", "prumerge", "tome", "dyrate", "vtw")
WAYS = {
    "images": ({}, {}, {}),
    "video": ({"video": 8, "images": (1, 0)}, {}, {}),
    "right": ({"padding": "right", "images": (2, 1)}, {}, {}),
    "alone": ({"only": 1}, {"guard": "off"}, {}),
    "text": ({"images": (0, 0)}, {}, {}),
    "static": ({"images": (1, 2)}, {}, {"cache_implementation": "static"}),
    "beams": ({}, {}, {"num_beams": 2}),
    "eager": ({"images": (1, 2)}, {}, {}),
    "encoded": ({}, {"feature_cache": 2**24}, {}),
}
Cell = dict[str, Any]


def digest(value: Any) -> str:
    """Return a digest of a tensor's shape, dtype and bytes, or of plain values."""
    if isinstance(value, torch.Tensor):
        value = [str(value.dtype), list(value.shape), value.contiguous().view(torch.uint8).numpy().tobytes().hex()]
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()


def _budget(per: str = "image", **keep: Any) -> tokenprune.Budget:
    """Return the budget with these JSON keys. Budgets of earlier commits have no `from_json`."""
    from_json = getattr(tokenprune.Budget, "from_json", None)
    return tokenprune.Budget(**keep, per=per) if from_json is None else from_json(keep, per)


@torch.no_grad()
def answered(model: Any, ask: Callable[[], Cell], options: Cell, patch: Cell | None) -> Cell:
    """Return the cell of a model under a patch, or without one."""
    torch.manual_seed(0)
    cell: Cell = {}

    def note_stats(call: str) -> None:
        if patch is not None:
            stats = tokenprune.stats(model).as_dict()
            del stats["overhead_ms"]
            stats["cuts"] = [f"{cut['site']} {cut['layer']} {cut['method']} {digest(cut)}" for cut in stats["cuts"]]
            cell.update({f"{call} {name}": value for name, value in stats.items()})

    try:
        if patch is not None:
            if isinstance(patch.get("keep"), dict):
                patch = {**patch, "keep": _budget(**patch["keep"])}
            tokenprune.patch(model, **patch, record=True)
        inputs = ask()
        cell["prefill logits"] = digest(model(**inputs).logits)
        note_stats("prefill")
        extra = {"max_new_tokens": 3, "output_logits": True, "return_dict_in_generate": True}
        out = model.generate(**inputs, do_sample=False, **extra, **options)
        cell |= {f"step {step} logits": digest(logits) for step, logits in enumerate(out.logits)}
        cell["tokens"] = out.sequences[:, inputs["input_ids"].shape[1] :].tolist()
        note_stats("generate")
    except Exception as error:  # a refusal, or a fault
        cell |= {"raised": type(error).__name__, "patched": tokenprune.is_patched(model), "message": str(error)}
    finally:
        if tokenprune.is_patched(model):
            tokenprune.unpatch(model)
    return cell


def settings() -> dict[str, Cell | None]:
    """Return the options of `patch` by name: each method at each keep and with each switch changed, and stacks.

    The first and the last setting have no patch.
    """
    methods = tokenprune.available_methods()
    plain = [{"method": method, "keep": keep} for method in (*methods, *STACKS) for keep in KEEPS]
    for method in methods:
        options = tokenprune.method_info(method).options.items()
        plain += [{"method": method, option: not value} for option, value in options if isinstance(value, bool)]
    named = {
        " ".join(f"{k}={v}" for k, v in setting.items())[7:]: {"keep": 0.4} | setting for setting in (*plain, *OTHERS)
    }
    for setting in named.values():
        setting["method"] = setting["method"].split("+") if "+" in setting["method"] else setting["method"]
    return {"unpatched": None, **named, "unpatched again": None}


class Shipped:
    """A shipped model, its processor, and two questions about generated images. The second question has both images."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.processor = transformers.AutoProcessor.from_pretrained(folder)
        self.processor.tokenizer.padding_side = "left"
        cells = torch.rand(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
        sizes = ((120, 160), (168, 112))
        drawn = [torch.nn.functional.interpolate(cell[None], size)[0] for cell, size in zip(cells, sizes, strict=True)]
        self.images = [Image.fromarray((image * 255).byte().permute(1, 2, 0).numpy()) for image in drawn]

    def ask(self) -> Cell:
        chats = []
        for images, question in ((self.images[:1], "what color is it?"), (self.images, "is a square on the left?")):
            content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": question}]
            chats.append([{"role": "user", "content": content}])
        options = {"tokenize": True, "return_dict": True, "processor_kwargs": {"padding": True, "return_tensors": "pt"}}
        inputs = self.processor.apply_chat_template(chats, add_generation_prompt=True, **options)
        return {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}

    def fitted(self, folder: Path) -> dict[str, Cell]:
        """Return settings with files fitted to the model. The files are written to `folder`."""
        files = [str(folder / name) for name in ("thresholds", "recipe", "prior")]
        fits = [tokenprune.method_info(name).cls.fit for name in ("dymu", "fitprune", "d2pruner")]
        fits[0](self.model, SimpleNamespace(images=self.images, processor=self.processor), files[0], keep=0.4)
        for fit, file in zip(fits[1:], files[1:], strict=True):
            fit(self.model, [self.ask()], file)
        fitted_options = zip(("dymu", "fitprune", "d2pruner"), ("thresholds", "recipe", "prior"), files, strict=True)
        return {
            f"{method} fitted": {"method": method, option: file, "keep": 0.4} for method, option, file in fitted_options
        }
