# SPDX-License-Identifier: Apache-2.0
"""StreamMem against a loop over heads and the rows of eager attention, written from its description."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from transformers import PreTrainedModel

import tokenprune
from policy_views import view_of
from processors import demo_model, llava, photo
from session_oracle import Recorded, close, images_of, played, recorded
from tokenprune.errors import OptionError, SessionError, UnsupportedSetupError
from tokenprune.integrations.hf.sessions.memory import FRAME, INDEX, Memory
from tokenprune.integrations.hf.sessions.positions import make_text_positions
from zoo import FAMILIES, IMAGE

PROXY = (30, 31, 32, 33)
NAMES = ["llava", "qwen2_5_vl", "qwen3_vl", "gemma3"]


def streammem(**options) -> tokenprune.sessions.Policy:
    return tokenprune.sessions.policy("streammem", proxy=PROXY, **options)


def made(name: str, model: PreTrainedModel, memory: int = 110, **options) -> Recorded:
    return recorded(FAMILIES[name], model, memory=memory, policy=streammem(**options))


def eager_rows(stream, memory: Memory) -> list[torch.Tensor]:
    """Return the rows of eager attention, `[Hq, P, held]` of each layer that can be cut, on a copy of the cache."""
    other = stream.fork()
    other.memory = memory.copy()
    ids = torch.tensor([PROXY])
    positions = make_text_positions(stream.adapter, stream.progress.next, len(PROXY), ids.device)
    types = other._token_types(ids)
    stream.model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            output = stream.model(
                input_ids=ids, position_ids=positions if len(positions) > 1 else positions[0],
                past_key_values=other.memory.cache, use_cache=True, output_attentions=True, **types,
            )  # fmt: skip
    finally:
        stream.model.set_attn_implementation("sdpa")
    return [output.attentions[layer][0, ..., : memory.held] for layer in memory.full_layers]


def naive(rows: torch.Tensor, visual: list[list[int]], keep: int) -> list[tuple[dict[int, float], set[int]]]:
    """Return of each KV head the scores of its visual entries, and those that stay."""
    found, group = [], len(rows) // len(visual)
    for head, places in enumerate(visual):
        scores = {}
        for place in places:
            paid = [
                float(rows[query, token, place])
                for query in range(head * group, (head + 1) * group)
                for token in range(len(PROXY))
            ]
            scores[place] = sum(paid) / len(paid)
        best = sorted(places, key=lambda place: (-scores[place], place))[:keep]
        found.append((scores, set(best)))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_it_keeps_what_the_loop_keeps_of_eager_attention(name: str, monkeypatch) -> None:
    model = FAMILIES[name].build()
    one = made(name, model)
    compress, compared = Memory.compress, []

    def watched(self, policy, keep, step, seed, rows=None):
        wanted_rows, tables = eager_rows(one.session._stream, self), list(self.tables)
        compress(self, policy, keep, step, seed, rows)
        for own, wanted, old, new in zip(rows, wanted_rows, tables, self.tables, strict=True):
            assert (own - wanted.mean(1)).abs().max() < 1e-6
            visual = [(old[FRAME, min(head, old.shape[1] - 1)] >= 0).nonzero()[:, 0].tolist() for head in range(2)]
            for head, (scores, best) in enumerate(naive(wanted, visual, keep)):
                before, after = old[INDEX, min(head, old.shape[1] - 1)].tolist(), new[INDEX, head].tolist()
                kept = {place for place in visual[head] if before[place] in after}
                assert len(kept) == keep
                # What is not the same has the same score, but for the last bits of another way to compute it.
                for place, other in zip(sorted(kept - best), sorted(best - kept), strict=True):
                    assert abs(scores[place] - scores[other]) < 1e-6
                compared.append(kept == best)

    monkeypatch.setattr(Memory, "compress", watched)
    played(one)
    assert len(compared) >= 8 * len(one.session.held) and sum(compared) > 0.9 * len(compared)


@pytest.mark.parametrize("name", NAMES)
def test_heads_hold_their_own_and_it_equals_one_prefill_under_masks(name: str, build) -> None:
    model = build(FAMILIES[name])
    one, silent = played(made(name, model), asked=True), played(made(name, model))
    first = one.session.held[0]
    assert first.index.shape[0] == 2 and not torch.equal(first.index[0], first.index[1])
    assert all(bool(((held.frame < 0).sum(1) == 9).all()) for held in one.session.held)
    found = one.logits()
    assert torch.equal(found, silent.logits())
    assert close(found, one.one_prefill())
    assert (found - one.one_prefill(masked=False)).abs().max() > 0.01


@pytest.mark.parametrize("name", NAMES)
def test_the_proxy_leaves_no_trace(name: str, build) -> None:
    """A policy that reads the proxy's attention, and keeps what one does that reads nothing, leaves the same bits."""
    model, policy = build(FAMILIES[name]), tokenprune.sessions.policy("uniform")

    class Reads(type(policy)):
        needs = frozenset({"proxy_attention"})
        name = "reads"
        proxy_query = PROXY

        def select(self, view, keep):
            assert view.proxy_attention.shape == (4, view.count)
            return super().select(view, keep)

    one, other = (played(recorded(FAMILIES[name], model, memory=110, policy=chosen)) for chosen in (Reads(), policy))
    assert one.session.stats.compressions == other.session.stats.compressions > 3
    assert torch.equal(one.logits(), other.logits())
    assert dataclasses.replace(one.session.stats, kv_bytes_peak=0) == dataclasses.replace(
        other.session.stats, kv_bytes_peak=0
    )
    assert not any("_tokenprune_taps" in vars(module) for module in model.modules())


def test_all_heads_keep_the_same_where_told(build) -> None:
    held = played(made("llava", build(FAMILIES["llava"]), heads="mean")).session.held
    assert all(one.index.shape[0] == 1 for one in held)
    assert not torch.equal(held[0].index, held[-1].index)


def test_what_the_proxy_overlooks_goes_first() -> None:
    view = view_of(6, 5)
    attention = view.proxy_attention.clone()
    attention[:, ::3] = 0
    kept = tokenprune.sessions.policy("streammem").select(dataclasses.replace(view, proxy_attention=attention), 20)
    assert kept.tolist() == [[place for place in range(30) if place % 3]] * 2


def test_the_chat_template_is_the_proxy_or_a_text() -> None:
    model, processor = demo_model(), llava()
    session = tokenprune.sessions.session(model, processor, memory=400, policy="streammem")
    assert torch.equal(session._stream.proxy, session._prompt_writer.encode_closing()) and session._stream.proxy.numel()
    session.say("look").see([photo(64, 64, seed) for seed in range(6)])
    assert session.stats.compressions and session.stats.visual <= 400
    asked = tokenprune.sessions.session(
        model, processor, memory=400, policy=tokenprune.sessions.policy("streammem", proxy="what color is it?")
    )
    asked.say("look").see([photo(64, 64, seed) for seed in range(6)])
    assert not torch.equal(asked.held[0].index, session.held[0].index)
    assert session.fork().ask("what?", max_new_tokens=2) == session.ask("what?", max_new_tokens=2)


def test_a_saved_session_goes_on_with_its_proxy(build, tmp_path) -> None:
    model = build(FAMILIES["llava"])
    one = played(made("llava", model)).session
    one.save(tmp_path / "s.safetensors")
    other = tokenprune.sessions.Session.load(tmp_path / "s.safetensors", model)
    assert other.policy == one.policy
    for image in images_of(FAMILIES["llava"], 5, seed=9):
        for session in (one, other):
            session.see(input_ids=image.ids, **FAMILIES["llava"].collate([[image]]))
    assert all(torch.equal(a.index, b.index) for a, b in zip(one.held, other.held, strict=True))


def test_a_proxy_that_cannot_be_is_refused(build) -> None:
    model = build(FAMILIES["llava"])
    with pytest.raises(SessionError, match=r"needs a processor.*proxy=\[...\]"):
        tokenprune.sessions.session(model, memory=100, policy="streammem")
    for proxy in ((), (5, IMAGE)):
        with pytest.raises(OptionError, match="list of text token ids"):
            tokenprune.sessions.session(model, memory=100, policy=tokenprune.sessions.policy("streammem", proxy=proxy))
    with pytest.raises(OptionError, match="proxy=3 must be"):
        tokenprune.sessions.policy("streammem", proxy=3)


def test_the_proxy_has_its_place_below_the_horizon(build) -> None:
    one = recorded(FAMILIES["llava"], build(FAMILIES["llava"]), memory=100, policy=streammem(), horizon=74)
    with pytest.raises(UnsupportedSetupError, match="position 75"):
        one.see(images_of(FAMILIES["llava"], 2))
    one = recorded(FAMILIES["llava"], build(FAMILIES["llava"]), memory=100, policy=streammem(), horizon=75)
    one.see(images_of(FAMILIES["llava"], 2))


def test_sessions_of_two_threads_on_one_model_do_not_mix(build) -> None:
    model, found = build(FAMILIES["llava"]), {}
    wanted = {memory: played(made("llava", model, memory)).logits() for memory in (110, 140)}

    def run(memory: int) -> None:
        for _ in range(3):
            found.setdefault(memory, []).append(played(made("llava", model, memory)).logits())

    threads = [threading.Thread(target=run, args=(memory,)) for memory in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(found[memory]) == 3 for memory in wanted)
    assert all(torch.equal(one, wanted[memory]) for memory, many in found.items() for one in many)
