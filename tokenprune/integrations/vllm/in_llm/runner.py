# SPDX-License-Identifier: Apache-2.0
"""Worker: before each pass, set the tokens and slots of the layers after the cut."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tokenprune.errors import TokenPruneError
from tokenprune.integrations.vllm.compat import wrap
from tokenprune.integrations.vllm.in_llm.layout import (
    RequestStep,
    StepLayout,
    VisualPiece,
    get_plans,
    lay_out,
    split_pieces,
)
from tokenprune.integrations.vllm.in_llm.reducer import DecoderPass, Reducer, RequestCut, find_grids
from tokenprune.integrations.vllm.settings.items import count_requested

logger = logging.getLogger(__name__)


def wrap_forward() -> None:
    """Let the runner of this process prepare each pass of a model with the attribute `tokenprune_in_llm`."""

    def wrap_original(original: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            in_llm = getattr(self.get_model(), "tokenprune_in_llm", None)
            if in_llm is None:
                return original(self, *args, **kwargs)
            with in_llm.reducer.apply(in_llm.prepare(self)):
                return original(self, *args, **kwargs)

        return forward

    wrap(GPUModelRunner, "_model_forward", wrap_original)


class InLLM:
    """Token dropping inside a model: the hooks on its layers, and the requests of the last step.

    Args:
        aligned: Whether items lose complete blocks of the KV cache.
    """

    def __init__(self, model: Any, reducer: Reducer, aligned: bool) -> None:
        self.model = model
        self.reducer = reducer
        self.aligned = aligned
        # Request of the last step -> its items, their number, and their pieces.
        self._known: dict[str, tuple[list[Any], int, list[VisualPiece]]] = {}
        self._warned = False

    def prepare(self, runner: Any) -> DecoderPass | None:
        """Set the metadata and slots of the layers after the cut, and return the pass if tokens are dropped in it.

        The first steps of a server do not have metadata (vLLM measures memory) and do not call this method.
        """
        steps = self._build_steps(runner)
        if not any(step.cut_pieces or step.past_pieces for step in steps):
            return None
        tables = runner.input_batch.block_table
        layout = lay_out(steps, tables[0].max_num_blocks_per_req, tables[0].block_size, self.aligned)
        context = get_forward_context()
        for group, kv_group in enumerate(runner.kv_cache_config.kv_cache_groups):
            names = [name for name in kv_group.layer_names if name in self.reducer.names]
            if not names:
                continue
            slots, metadata = _build_metadata(runner, layout, group)
            for name in names:
                context.attn_metadata[name] = metadata
                context.slot_mapping[name] = slots
        starts = runner.query_start_loc.np
        cuts = [self._cut(runner, row, int(starts[row]), step) for row, step in enumerate(steps) if step.cut_pieces]
        if not cuts:
            return None
        rows = int(starts[len(steps)])
        return DecoderPass(cuts, rows, rows - sum(piece.drop for cut in cuts for piece in cut.request.cut_pieces))

    def _build_steps(self, runner: Any) -> list[RequestStep]:
        batch = runner.input_batch
        starts = runner.query_start_loc.np
        steps, known = [], {}
        for row, name in enumerate(batch.req_ids[: batch.num_reqs]):
            features = runner.requests[name].mm_features
            entry = self._known.get(name)
            if entry is None or entry[0] is not features or entry[1] != len(features):
                entry = features, len(features), self._find_pieces(features, runner)
            known[name] = entry
            computed = int(batch.num_computed_tokens_cpu[row])
            end, prompt = computed + int(starts[row + 1] - starts[row]), runner.requests[name].num_prompt_tokens
            steps.append(RequestStep(computed, end, entry[2], prompt))
        self._known = known
        return steps

    def _find_pieces(self, features: list[Any], runner: Any) -> list[VisualPiece]:
        items = get_plans(features)
        block = runner.input_batch.block_table[0].block_size if self.aligned else None
        pieces = split_pieces(items, block)
        for piece in pieces:
            setting, count = items[piece.item][0].setting, len(piece.indices)
            if self._warned or piece.drop or setting.method is None or count_requested(setting, count) == count:
                continue
            self._warned = True
            logger.warning(
                "tokenprune: all %d tokens of an image are kept instead of %d, because prefix caching drops only "
                "complete blocks of %s tokens. Use a smaller --block-size, or --no-enable-prefix-caching.",
                *(count, count_requested(setting, count), block),
            )
        return pieces

    def _cut(self, runner: Any, row: int, start: int, step: RequestStep) -> RequestCut:
        request = runner.requests[runner.input_batch.req_ids[row]]
        end = step.end
        if self.reducer.reads_whole_prompt:
            if step.computed > 0 or step.end < request.num_prompt_tokens:
                raise TokenPruneError(
                    f"A step has prompt tokens {step.computed} to {step.end} of {request.num_prompt_tokens}, but "
                    f"{self.reducer.method.name} needs the whole prompt. Report this with the server's configuration."
                )
            end = request.num_prompt_tokens
        grids = find_grids(self.model, step.cut_pieces, [feature.data for feature in request.mm_features])
        return RequestCut(start, start + end - step.computed, step, grids)


def _build_metadata(runner: Any, layout: StepLayout, group: int) -> tuple[torch.Tensor, Any]:
    """Return the slots of the tokens after the cut in a group of layers, and the metadata of their attention."""
    requests, unpruned = len(layout.lengths), runner.input_batch.block_table[group]
    unpruned_table, block_size = unpruned.get_device_tensor(requests), unpruned.block_size  # [R, W]
    device = unpruned_table.device

    def to_device(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(values).to(device=device, dtype=dtype, non_blocking=True)

    table = unpruned_table.gather(1, to_device(layout.columns, torch.int64))
    row, column, offset = (to_device(values, torch.int64) for values in (layout.row, layout.column, layout.offset))
    slots = table[row, column].long() * block_size + offset
    lengths = torch.from_numpy(layout.lengths.astype(np.int32))
    starts = torch.from_numpy(layout.starts)
    batch = runner.input_batch
    computed = batch.num_computed_tokens_cpu_tensor[:requests]
    metadata = runner.attn_groups[group][0].build_metadata(
        CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(device),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=requests,
            num_actual_tokens=len(layout.row),
            max_query_len=int(np.diff(layout.starts).max()),
            max_seq_len=int(layout.lengths.max()),
            block_table_tensor=table,
            slot_mapping=slots,
            causal=True,
            is_prefilling=computed < batch.num_prompt_tokens_cpu_tensor[:requests],
        )
    )
    return slots, metadata
