# SPDX-License-Identifier: Apache-2.0
"""restore against naive loops: its groups and its calibrated attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import tokenprune
from each import each
from greedy import SIZES, alone, image_tokens
from module_calls import record_inputs
from tokenprune import OptionError, UnsupportedSetupError
from tokenprune.integrations.shared.checks.vllm import find_unserved_reason
from zoo import FAMILIES


def naive_groups(x: Tensor, chosen: list[int], anchors: int, rival: str) -> dict[int, list[int]]:
    """Return the members of each group by the group's kept token, for float64 tokens x, shape (tokens, channels)."""
    unit = x / x.norm(dim=1, keepdim=True)
    rest = [i for i in range(len(x)) if i not in chosen]
    similarity = {(i, j): round(float(unit[i] @ unit[j]) * 2**20) / 2**20 for i in rest for j in rest}
    r = {i: sum(similarity[i, j] for j in rest) for i in rest}

    def score(i: int) -> float:
        rivals = [j for j in rest if (r[j] < r[i] if rival == "weaker" else r[j] > r[i])]
        return r[i] * (1 - max((similarity[i, j] for j in rivals), default=0.0))

    anchor_tokens = sorted(sorted(rest, key=lambda i: (-score(i), i))[:anchors])
    members: dict[int, list[int]] = {i: [i] for i in anchor_tokens}
    for i in rest:
        if anchor_tokens and i not in anchor_tokens:
            members[max(anchor_tokens, key=lambda j: (similarity[i, j], -j))].append(i)
    groups = {i: [i] for i in chosen}
    for group in members.values():
        group.sort()
        groups[group[(len(group) - 1) // 2]] = group
    return groups


@pytest.mark.parametrize("options", [{}, {"rival": "stronger"}, {"merged": 0.25}, {"chooser": "scope"}], ids=str)
def test_equals_naive_loop(options: dict[str, Any]) -> None:
    method, merged = tokenprune.method("restore", **options), options.get("merged", 0.5)
    for counts, keep, dtype in [*SIZES, ([30, 9], [2, 9], torch.float32)]:
        tokens = image_tokens(counts, keep, dtype)
        num_chosen = [k if k >= n else max(1, int((1 - merged) * k)) for k, n in zip(keep, counts, strict=True)]
        first = tokenprune.method(options.get("chooser", "divprune")).select(image_tokens(counts, num_chosen, dtype))
        selection = method.select(tokens)
        assert selection.keep.sum(1).tolist() == keep == selection.counts
        for row, num_kept in enumerate(keep):
            chosen = (first.keep[row] & tokens.mask[row]).nonzero().flatten().tolist()
            want = naive_groups(
                alone(tokens, row)["x"], chosen, num_kept - num_chosen[row], options.get("rival", "weaker")
            )
            kept = selection.keep[row].nonzero().flatten().tolist()
            assert kept == sorted(want)
            for centre, members in want.items():
                assert (selection.assign[row] == centre).nonzero().flatten().tolist() == members
                assert tokens.carry["sizes"][row, centre] == len(members)
            num_dropped = counts[row] - sum(map(len, want.values()))
            assert num_dropped == 0 or num_kept == num_chosen[row], "no tokens are dropped if there is an anchor"
            assert int((selection.assign[row, : counts[row]] < 0).sum()) == num_dropped


def test_merged_0_equals_the_chooser() -> None:
    tokens = image_tokens([64, 40], [30, 7])
    got = tokenprune.method("restore", merged=0.0).select(tokens)
    assert torch.equal(got.keep, tokenprune.method("divprune").select(tokens).keep)


def test_zero_tokens_are_merged() -> None:
    tokens = image_tokens([12], [4], hidden=torch.zeros(1, 12, 32))
    selection = tokenprune.method("restore").select(tokens)
    assert selection.keep.sum() == 4 and (selection.assign >= 0).all()


# -- attention

CALIBRATED = tokenprune.method("restore", calibrate=True)


class NaiveAttention:
    """Calibrated attention as a transformers attention function, written from the description.

    Args:
        position: Position ids, shape (batch, tokens) or (3, batch, tokens).
        size: Number of merged tokens per token, shape (batch, tokens), float.
        mean_size: Replacement of `size` in the first layer, where all groups have the mean size.
        step: Whether the last token is a decoding step after a cached prefill.
    """

    def __init__(self, model: Any, position: Tensor, size: Tensor, mean_size: Tensor, step: bool) -> None:
        self.model, self.position, self.size, self.mean_size, self.step = model, position, size, mean_size, step

    def distances(self) -> Tensor:
        config = self.model.config.get_text_config()
        theta = self.model.model.language_model.rotary_emb.inv_freq.double()
        axis = torch.zeros(len(theta), dtype=torch.long)
        position = self.position if self.position.ndim == 3 else self.position[None]
        if len(position) == 3:
            rope = getattr(config, "rope_parameters", None) or config.rope_scaling
            axis = torch.repeat_interleave(torch.arange(3), torch.tensor(rope["mrope_section"]))
        distance = (position.unsqueeze(-1) - position.unsqueeze(-2)).double()  # [axes, B, W, W]
        return torch.stack([(distance[axis[j]] * theta[j]).cos() for j in range(len(theta))]).mean(0)

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        logits = query.double() @ key.double().transpose(2, 3) * kwargs["scaling"]
        size = (self.size if module.layer_idx else self.mean_size).double().log()[:, None, None]
        bias = size + (2 - self.distances()).clamp(min=1e-6).log()[:, None]
        if self.step:
            bias[:, :, -1] = self.size.double().log()[:, None]
        causal = torch.ones(bias.shape[-2:], dtype=torch.bool).tril()
        weight = (logits + bias).masked_fill(~causal, -1e9).softmax(-1)
        return (weight @ value.double()).to(query.dtype).transpose(1, 2).contiguous(), None


@torch.no_grad()
def record_decoder_inputs(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of the unpatched model's decoder."""
    with record_inputs(model.model.language_model, note=lambda args, kwargs: kwargs) as calls:
        model(**inputs)
    return calls[0]


def compute_reference(
    model: Any, inputs: dict[str, Any], sources: dict[int, list[int]], extra: Tensor | None = None
) -> Tensor:
    """Return the last token's logits for one row with one image, computed from the description.

    Args:
        sources: Members of each group by its kept token.
        extra: Token id of a decoding step after the prompt.
    """
    decoder_inputs = record_decoder_inputs(model, inputs)
    embeds, position = decoder_inputs["inputs_embeds"], decoder_inputs["position_ids"]
    length = embeds.shape[1]
    position = torch.arange(length)[None] if position is None else position
    position = position[1:] if position.ndim == 3 and len(position) == 4 else position
    visual = (inputs["input_ids"] == model.config.image_token_id)[0].nonzero().flatten().tolist()
    members = {position_index: list(group) for position_index, group in sources.items()}
    kept = [i for i in range(length) if i not in visual or i in members]
    rows = torch.stack([embeds[0, members.get(i, [i])].mean(0) for i in kept])[None]
    size = torch.tensor([[float(len(members.get(i, [i]))) for i in kept]])
    mean_size = torch.tensor([[len(visual) / len(members) if i in members else 1.0 for i in kept]])
    position = position[..., kept]
    if extra is not None:
        rows = torch.cat([rows, model.get_input_embeddings()(extra)], 1)
        size, mean_size = (torch.cat([x, torch.ones(1, 1)], 1) for x in (size, mean_size))
        position = torch.cat([position, position.amax() + 1 + torch.zeros_like(position[..., :1])], -1)
    attention = NaiveAttention(model, position, size, mean_size, extra is not None)
    ALL_ATTENTION_FUNCTIONS.register("weighed", attention)
    config = model.model.language_model.config
    before, config._attn_implementation = config._attn_implementation, "weighed"
    try:
        with torch.no_grad():
            out = model.model.language_model(inputs_embeds=rows, position_ids=position, use_cache=False)
            return model.lm_head(out.last_hidden_state[:, -1])
    finally:
        config._attn_implementation = before


@each("name, attention", [("llava", "sdpa"), ("llava", "eager"), ("qwen2_5_vl", "sdpa"), ("qwen2_vl", "eager")])
def test_calibrated_attention_equals_the_formula(name: str, attention: str) -> None:
    family = FAMILIES[name]
    model, inputs = family.build(attention), family.make_inputs(images=(1,))
    with tokenprune.patched(model, "restore", keep=0.3, calibrate=True, record=True), torch.no_grad():
        out = model(**inputs)
        ((sources,),) = [cut.sources for cut in tokenprune.stats(model).cuts]
        token = out.logits[:, -1:].argmax(-1)
        step = model(input_ids=token, past_key_values=out.past_key_values)
    torch.testing.assert_close(out.logits[:, -1], compute_reference(model, inputs, sources), atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(
        step.logits[:, -1], compute_reference(model, inputs, sources, token), atol=2e-4, rtol=1e-4
    )
    with tokenprune.patched(model, "restore", keep=0.3), torch.no_grad():
        assert (model(**inputs).logits[:, -1] - out.logits[:, -1]).abs().max() > 1e-2


@each("attention", ["sdpa", "eager"])
def test_calibrated_batch_matches_single_rows(attention: str) -> None:
    family = FAMILIES["llava"]
    model, batch = family.build(attention), {"images": (2, 1, 1)}
    options = {"do_sample": False, "max_new_tokens": 4, "output_logits": True, "return_dict_in_generate": True}
    with tokenprune.patched(model, "restore", keep=0.3, calibrate=True), torch.no_grad():
        got = torch.stack(model.generate(**family.make_inputs(**batch), **options).logits, 1)
        for row in range(3):
            single = model.generate(**family.make_inputs(**batch, only=row), **options)
            torch.testing.assert_close(got[row], torch.cat(single.logits), atol=2e-4, rtol=1e-4)


def test_row_without_drops_is_unchanged() -> None:
    family = FAMILIES["qwen2_5_vl"]
    model, inputs = family.build(), family.make_inputs(images=(1, 1))
    num_tokens = min(sum(row) for row in inputs.counts)
    (unpruned,) = [row for row, counts in enumerate(inputs.counts) if sum(counts) == num_tokens]
    with torch.no_grad():
        plain = model(**inputs).logits[:, -1]
        with tokenprune.patched(model, "restore", keep=num_tokens, calibrate=True):
            got = model(**inputs).logits[:, -1]
    torch.testing.assert_close(got[unpruned], plain[unpruned], atol=1e-4, rtol=1e-4)
    assert (got[1 - unpruned] - plain[1 - unpruned]).abs().max() > 1e-2


def test_unsupported_calibration_raises() -> None:
    family = FAMILIES["llava"]
    model = family.build()
    with pytest.raises(OptionError, match="fastv acts inside it"):
        tokenprune.patch(model, [CALIBRATED, "fastv"], keep=[0.5, 0.5])
    sliding = FAMILIES["gemma3"]
    with pytest.raises(UnsupportedSetupError, match=r"sliding window.*calibrate=False"):
        tokenprune.patch(sliding.build(), CALIBRATED, keep=0.5)
    tokenprune.unpatch(tokenprune.patch(sliding.build(), "restore", keep=0.5))
    with tokenprune.patched(model, CALIBRATED, keep=0.5), pytest.raises(UnsupportedSetupError, match="static cache"):
        model.generate(**family.make_inputs(), max_new_tokens=2, cache_implementation="static")
    reason = find_unserved_reason(CALIBRATED)
    assert reason is not None and "calibrate=false" in reason
    assert find_unserved_reason(tokenprune.method("restore")) is None


@each("chooser", ["fastv", "pool", "downsample", "towerdrop", "restore"])
def test_unsupported_chooser_raises(chooser: str) -> None:
    with pytest.raises(OptionError, match="chooser"):
        tokenprune.method("restore", chooser=chooser)
