# SPDX-License-Identifier: Apache-2.0
"""Worker: set the tokens and slots of the layers after the cut before each pass."""

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
    """Let the runner of this process prepare each pass of a model that has a `tokenprune_in_llm`. Other models run as
    before."""

    def around(original: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            in_llm = getattr(self.get_model(), "tokenprune_in_llm", None)
            if in_llm is None:
                return original(self, *args, **kwargs)
            with in_llm.reducer.apply(in_llm.prepare(self)):
                return original(self, *args, **kwargs)

        return forward

    wrap(GPUModelRunner, "_model_forward", around)


class InLLM:
    """The reduction inside a model: the hooks on its layers, and the requests of the last step."""

    def __init__(self, model: Any, reducer: Reducer, aligned: bool) -> None:
        self.model = model
        self.reducer = reducer
        self.aligned = aligned
        # Of the requests of the last step: their items, how many these were, and the pieces found in them.
        self._known: dict[str, tuple[list[Any], int, list[VisualPiece]]] = {}
        self._warned = False

    def prepare(self, runner: Any) -> DecoderPass | None:
        """Point the layers after the cut to their own tokens, and return the cut to be made, if any.

        A server's first steps are without metadata (vLLM measures memory) and do not come here.
        """
        shares = self._shares(runner)
        if not any(share.cut_pieces or share.past_pieces for share in shares):
            return None
        tables = runner.input_batch.block_table
        layout = lay_out(shares, tables[0].max_num_blocks_per_req, tables[0].block_size, self.aligned)
        context = get_forward_context()
        for group, one in enumerate(runner.kv_cache_config.kv_cache_groups):
            names = [name for name in one.layer_names if name in self.reducer.names]
            if not names:
                continue
            slots, metadata = _metadata(runner, layout, group)
            for name in names:
                context.attn_metadata[name] = metadata
                context.slot_mapping[name] = slots
        starts = runner.query_start_loc.np
        cuts = [self._cut(runner, row, int(starts[row]), share) for row, share in enumerate(shares) if share.cut_pieces]
        if not cuts:
            return None
        rows = int(starts[len(shares)])
        return DecoderPass(cuts, rows, rows - sum(piece.drop for cut in cuts for piece in cut.share.cut_pieces))

    def _shares(self, runner: Any) -> list[RequestStep]:
        batch = runner.input_batch
        starts = runner.query_start_loc.np
        shares, known = [], {}
        for row, name in enumerate(batch.req_ids[: batch.num_reqs]):
            features = runner.requests[name].mm_features
            found = self._known.get(name)
            if found is None or found[0] is not features or found[1] != len(features):
                found = features, len(features), self._find(features, runner)
            known[name] = found
            computed = int(batch.num_computed_tokens_cpu[row])
            end, prompt = computed + int(starts[row + 1] - starts[row]), runner.requests[name].num_prompt_tokens
            shares.append(RequestStep(computed, end, found[2], prompt))
        self._known = known
        return shares

    def _find(self, features: list[Any], runner: Any) -> list[VisualPiece]:
        items = get_plans(features)
        block = runner.input_batch.block_table[0].block_size if self.aligned else None
        pieces = split_pieces(items, block)
        for piece in pieces:
            setting, count = items[piece.item][0].setting, len(piece.indices)
            if self._warned or piece.drop or setting.method is None or count_requested(setting, count) == count:
                continue
            self._warned = True
            logger.warning(
                "tokenprune keeps all %d tokens of an image where %d were asked for: with prefix caching only whole "
                "blocks of the KV cache (%s tokens) are left out, and at least one stays. Use a smaller --block-size, "
                "or --no-enable-prefix-caching",
                *(count, count_requested(setting, count), block),
            )
        return pieces

    def _cut(self, runner: Any, row: int, start: int, share: RequestStep) -> RequestCut:
        request = runner.requests[runner.input_batch.req_ids[row]]
        end = share.end
        if self.reducer.reads_whole_prompt:
            if share.computed > 0 or share.end < request.num_prompt_tokens:
                raise TokenPruneError(
                    f"tokens {share.computed} to {share.end} of a prompt of {request.num_prompt_tokens} came alone, "
                    f"but {self.reducer.method.name} reads all of it; report this with the server's configuration"
                )
            end = request.num_prompt_tokens
        grids = find_grids(self.model, share.cut_pieces, [feature.data for feature in request.mm_features])
        return RequestCut(start, start + end - share.computed, share, grids)


def _metadata(runner: Any, layout: StepLayout, group: int) -> tuple[torch.Tensor, Any]:
    """Return the slots of the tokens after the cut in a group of layers, and the metadata of their attention."""
    requests, whole = len(layout.lengths), runner.input_batch.block_table[group]
    full, block_size = whole.get_device_tensor(requests), whole.block_size  # [R, W]
    device = full.device

    def to_device(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(values).to(device=device, dtype=dtype, non_blocking=True)

    table = full.gather(1, to_device(layout.columns, torch.int64))
    row, column, offset = (to_device(one, torch.int64) for one in (layout.row, layout.column, layout.offset))
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
