# SPDX-License-Identifier: Apache-2.0
"""Count the plugin's work per request, in the front end and in a worker, without a clock, like `engine_costs.py`.

python tests/vllm/worker_costs.py           # print the counts of each stage beside the table
python tests/vllm/worker_costs.py --update  # write lower counts into the table; raise counts by hand

The requests skip the tower and the language model, so the plugin does all counted work. Its tensors are on a simulated
device. A comparison replaces the greedy search of divprune, which is a kernel on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.append(str(Path(__file__).resolve().parents[1] / "unit" / "support"))

import numpy as np
import torch
from cachetools import LRUCache
from torch import Tensor
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFeatureSpec, MultiModalFieldElem, PlaceholderRange
from vllm.v1.worker.gpu.mm.rope import RopeState
from vllm.v1.worker.gpu.model_states.mm_pruning import MultiModalPruner

from checkpoints import CHECKPOINTS
from engine_costs import CountedOperations, counted_calls
from far_device import Far, counting
from front_end import processor
from tokenprune.integrations.vllm.plugin import register
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.integrations.vllm.settings.plan import Plan, field_name, find_runs
from tokenprune.integrations.vllm.worker.clock import Clock
from tokenprune.integrations.vllm.worker.models import ReducingLineModel, ReducingMropeModel
from tokenprune.integrations.vllm.worker.position_notes import PositionNotes
from tokenprune.integrations.vllm.worker.positions import wrap_gather_v1, wrap_recompute_v2
from tokenprune.methods.pre_llm import divprune
from tokenprune.models.families import SERVED

TABLE = Path(__file__).with_suffix(".json")
IMAGE, START, END, WIDTH = 9, 7, 8, 16
TEXT = 20  # tokens before an image, and after it
# Operations that launch no kernel.
_NO_LAUNCH = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "_unsafe_view",
    "lift_fresh",
}


class Launches(CountedOperations):
    """Count device operations that a GPU would run as a kernel or a copy. Views and host operations are not counted."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        values = args[0] if args and isinstance(args[0], list | tuple) else args
        on_device = isinstance(output, Far) or any(isinstance(value, Far) for value in (*args, *values))
        if on_device and not function.is_view and name not in _NO_LAUNCH:
            self.found[name] += 1
        return output


class _Features:
    """Model of vLLM with given outputs of the tower: `features`, one tensor for each item."""

    features: list[Tensor]

    def embed_multimodal(self, **kwargs: Any) -> list[Tensor]:
        return self.features

    def get_language_model(self) -> Any:
        return SimpleNamespace()


class _Llava(ReducingLineModel, _Features):
    tokenprune_family = SERVED["LlavaForConditionalGeneration"]


class _Qwen(ReducingMropeModel, _Features):
    tokenprune_family = SERVED["Qwen2_5_VLForConditionalGeneration"]
    iter_mm_grid_thw = Qwen2_5_VLForConditionalGeneration.iter_mm_grid_thw


def _rule(self: Any, tokens: list[int], features: list[Any]) -> tuple[Tensor, int]:
    return Qwen2_5_VLForConditionalGeneration.get_mrope_input_positions(self, tokens, features)


_Qwen._rule = _rule  # type: ignore[method-assign]


class Request:
    """Request with `images` images; its stages call the model like a worker's runner.

    Args:
        grid: (frames, height, width) of an image in patches with M-RoPE, or None for tokens on one axis.
    """

    def __init__(self, model: Any, count: int, grid: tuple[int, int, int] | None, images: int, setting: Any) -> None:
        self.model, self.grid = model, grid
        plan = Plan.build(parse_setting(setting), find_runs([IMAGE] * count), self.model.tokenprune_family.vllm.per_run)
        self.data, self.tokens, self.features = plan.encode(), list[int](), list[Any]()
        item = {field_name("image"): self.data} | ({} if grid is None else {"image_grid_thw": torch.tensor(grid)})
        for _ in range(images):
            self.tokens += [*range(30, 30 + TEXT), START]
            placeholder = PlaceholderRange(len(self.tokens), plan.rows)
            data = {
                name: MultiModalFieldElem(data=value, field=MultiModalBatchedField(keep_on_cpu=True))
                for name, value in item.items()
            }
            self.features.append(MultiModalFeatureSpec(data, "image", "", placeholder))
            self.tokens += [*plan.reduced(), END]
        self.tokens += range(30, 30 + TEXT)
        self.kwargs = {name: [value] * images for name, value in item.items()}
        if grid is not None:
            self.kwargs["image_grid_thw"] = torch.tensor([grid] * images)
        self.counts = [count] * images
        self.rows: list[Tensor] = []
        self.positions = torch.zeros(3, len(self.tokens), dtype=torch.long)

    def stages(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield name and function of each stage, in order."""
        if self.grid is not None:
            yield "prompt", self._prompt
        yield "choice", self._choice
        if self.grid is not None:
            yield "placing V1", self._placed_v1
            yield "placing V2", self._placed_v2

    def _prompt(self) -> None:
        notes = self.model.tokenprune_notes
        with notes.recording("one"):
            self.positions, _ = self.model.get_mrope_input_positions(self.tokens, self.features)
        notes._of_request[1] = notes._of_request["one"]  # Model Runner V2 uses this key

    def _choice(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.model.features = [Far(torch.randn(count, WIDTH, generator=generator)) for count in self.counts]
        self.rows = list(self.model.embed_multimodal(**self.kwargs))

    def _placed_v1(self) -> None:
        num_scheduled = {"one": len(self.tokens)}
        request = SimpleNamespace(num_computed_tokens=0, mm_features=self.features)
        runner = SimpleNamespace(
            get_model=lambda: self.model, requests={"one": request}, input_batch=SimpleNamespace(req_ids=["one"]),
            mrope_positions=SimpleNamespace(gpu=Far(self.positions.clone())),
        )  # fmt: skip
        wrap_gather_v1(lambda *_: (self.rows, None))(runner, SimpleNamespace(num_scheduled_tokens=num_scheduled))

    def _placed_v2(self) -> None:
        state: Any = RopeState.__new__(RopeState)
        state.num_dims, length = 3, len(self.tokens)
        state.prefill_positions = SimpleNamespace(gpu=Far(torch.zeros(6, length, dtype=torch.int32)))
        state.prefill_positions.gpu.near[3:] = self.positions
        state.prefill_delta = SimpleNamespace(np=np.zeros(2, np.int32))
        of_requests = SimpleNamespace(
            req_ids=["one"], idx_mapping_np=np.array([1]), prefill_len_np=np.array([length]),
            num_computed_prefill_tokens_np=np.array([0]), num_scheduled_tokens=np.array([length]),
        )  # fmt: skip
        known = SimpleNamespace(all_token_ids=SimpleNamespace(gpu=Far(torch.tensor([self.tokens] * 2))))
        cache: Any = SimpleNamespace(mm_features={"one": self.features})
        pruner = MultiModalPruner(self.model, state, cache, WIDTH)
        wrap_recompute_v2(MultiModalPruner.recompute)(pruner, self.rows, of_requests, known)
        self.state = state


def build_model(kind: type) -> Any:
    model: Any = kind.__new__(kind)
    model.tokenprune_active, model.tokenprune_original = True, False
    model.tokenprune_clock, model.tokenprune_tower, model.tokenprune_width = Clock(None), None, WIDTH
    model.tokenprune_cache, model.tokenprune_axes = LRUCache(64), 3 * (kind is _Qwen)
    model.tokenprune_notes = PositionNotes()
    vision = {"spatial_merge_size": 2, "tokens_per_second": 1.0, "image_size": 336, "patch_size": 14}
    tokens = {"image_token_id": IMAGE, "video_token_id": IMAGE + 1}
    model.config = SimpleNamespace(vision_config=SimpleNamespace(**vision), **tokens)
    return model


DIVPRUNE, OFF = {"method": "divprune", "keep": 0.25}, {"off": True}


def count_front_calls(name: str, images: int, setting: dict[str, Any]) -> Counter[str]:
    """Count the front end's calls for a request whose images are not cached."""
    checkpoint = CHECKPOINTS[name]
    with tempfile.TemporaryDirectory() as folder:
        mm_processor = processor(checkpoint.write(Path(folder)), setting)
        for _ in range(2):
            items, calls = mm_processor.info.parse_mm_data({"image": checkpoint.images(images)}), Counter[str]()
            with counted_calls(calls):
                mm_processor(checkpoint.prompt(images), items, hf_processor_mm_kwargs={})
    return calls


CASES: dict[str, tuple[type, int, tuple[int, int, int] | None, int, dict[str, Any]]] = {
    "llava": (_Llava, 576, None, 1, DIVPRUNE),
    "llava off": (_Llava, 576, None, 1, OFF),
    "llava, 3 images": (_Llava, 576, None, 3, DIVPRUNE),
    "qwen2_5_vl": (_Qwen, 2116, (1, 92, 92), 1, DIVPRUNE),
    "qwen2_5_vl off": (_Qwen, 2116, (1, 92, 92), 1, OFF),
    "qwen2_5_vl, 3 images": (_Qwen, 2116, (1, 92, 92), 3, DIVPRUNE),
}


def _select_first(features: Tensor, mask: Tensor, budget: Tensor, max_budget: int) -> Tensor:
    """Replace `farthest`."""
    return (torch.arange(mask.shape[1], device=mask.device) < budget[:, None]) & mask


def count_stages(case: str) -> dict[str, Counter[Any]]:
    """Count calls, launches and waits in each stage of a request."""
    kind, *arguments = CASES[case]
    register()
    counts, model = dict[str, Counter[Any]](), build_model(kind)
    with mock.patch.object(divprune, "farthest", _select_first), torch.no_grad():
        for _ in range(2):  # the first pass fills the caches
            for stage, run in Request(model, *arguments).stages():
                launches = counts[f"{stage} launches"] = Counter()
                with counting() as waits, Launches(launches):
                    run()
                counts[f"{stage} waits"] = Counter(waits.found)
        for stage, run in Request(model, *arguments).stages():
            calls = counts[f"{stage} calls"] = Counter()
            with counting(), counted_calls(calls):
                run()
    counts["front calls"] = count_front_calls(case.split()[0].strip(","), arguments[2], arguments[3])
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write lower counts")
    parser.add_argument("--most", type=int, default=0, metavar="N", help="print the N most frequent names of each")
    args = parser.parse_args()
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    rose = []
    for case in CASES:
        counts = count_stages(case)
        old, new = table.get(case, {}), {name: counter.total() for name, counter in counts.items()}
        print(f"{case}: " + "  ".join(f"{name} {old.get(name, '-')} -> {new[name]}" for name in new))
        for name, counter in counts.items():
            print(
                "".join(f"  {name} {times:4} {operation}\n" for operation, times in counter.most_common(args.most)),
                end="",
            )
        rose += [f"{case}: {name}" for name in new if new[name] > old.get(name, -1)]
        table[case] = {name: min(new[name], old.get(name, new[name])) for name in new}
    if rose:
        print(f"higher than in the table (raise it by hand, and give the reason): {', '.join(rose)}")
    if args.update:
        rows = ",\n".join(f"  {json.dumps(case)}: {json.dumps(row)}" for case, row in table.items())
        TABLE.write_text(f"{{\n{rows}\n}}\n")
    return bool(rose)


if __name__ == "__main__":
    sys.exit(main())
