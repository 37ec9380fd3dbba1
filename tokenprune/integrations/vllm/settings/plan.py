# SPDX-License-Identifier: Apache-2.0
"""The processor's decision for one image or video, carried out by the model in another process."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any

import torch
from cachetools import LRUCache, cached
from torch import Tensor

from tokenprune.errors import OptionError, PlaceholderMismatchError
from tokenprune.integrations.vllm.settings.items import count_kept, get_method
from tokenprune.integrations.vllm.settings.keys import KEY
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.integrations.vllm.settings.towers import acts_in_tower
from tokenprune.selection.frames import frame_counts, tokens_per_frame
from tokenprune.selection.observable_registry import compares_frames
from tokenprune.settings import Setting

# Items of these modalities lose tokens; others (audio) do not.
MODALITIES = ("image", "video")


def field_name(modality: str) -> str:
    """Return the name of the field that carries an item's plan: a field belongs to one modality."""
    return f"{KEY}_{modality}"


# Of an item's text in the prompt: a token's id, True for a placeholder, and how many such stand in a row. A long item
# has few of them, and what its plan costs follows from these, not from its tokens.
Run = tuple[int, bool, int]


def find_runs(tokens: Sequence[int], embeds: Any = None) -> tuple[Run, ...]:
    """Return the runs of an item's text. tokens: its ids. embeds: for each True where it is a placeholder, and gets a
    row of the encoder's output; None: all are."""
    runs, changes = list[Run](), list[int]()
    if embeds is not None:
        embeds = torch.as_tensor(embeds, device="cpu")
        changes = ((embeds[1:] != embeds[:-1]).nonzero().flatten() + 1).tolist()
    for start, end in itertools.pairwise([0, *changes, len(tokens)]):
        own, embed = tokens[start:end], embeds is None or bool(embeds[start])
        if own.count(own[0]) == len(own):
            runs.append((own[0], embed, len(own)))
        else:
            runs += [(token, embed, len(list(group))) for token, group in itertools.groupby(own)]
    return tuple(runs)


@dataclass(frozen=True)
class Plan:
    """The tokens that vLLM would write for an item, and the setting that makes them fewer.

    text:    the item's text in the prompt, placeholders and what stands between them (see `Run`).
    per_run: see `Family`.
    kept:    of a method that decides by pixels which placeholders stay, in their order; None: the model decides.
    frames:  of a video how many it has, where they have a budget each and stand in one run, or the method compares
             them; else 1. Methods that act in the tower do so frame by frame where each has rows of its own. A tile is
             a frame to them.
    """

    setting: Setting
    text: tuple[Run, ...]
    per_run: bool
    frames: int = 1
    kept: tuple[bool, ...] | None = None

    @cached_property
    def length(self) -> int:
        """Number of the text's tokens."""
        return sum(number for *_, number in self.text)

    @property
    def tokens(self) -> list[int]:
        """The ids of the text."""
        return [token for token, _, number in self.text for token in itertools.repeat(token, number)]

    @cached_property
    def is_embed(self) -> Tensor:
        """Bool `[length]`, True for placeholders."""
        embeds, numbers = ([run[part] for run in self.text] for part in (1, 2))
        return torch.tensor(embeds, device="cpu").repeat_interleave(torch.tensor(numbers, device="cpu"))

    @cached_property
    def places(self) -> Tensor:
        """Long `[n]`, where the placeholders stand in the text."""
        return self.is_embed.nonzero().flatten()

    @cached_property
    def stretches(self) -> list[tuple[bool, range]]:
        """The unbroken runs of placeholders (True) and of what stands between them (False): where each is."""
        found, start = [], 0
        for embed, group in itertools.groupby(self.text, lambda run: run[1]):
            found.append((embed, range(start, start := start + sum(number for *_, number in group))))
        return found

    @cached_property
    def is_plain(self) -> bool:
        """True if the text is placeholders and nothing else."""
        return all(embed for _, embed, _ in self.text)

    @cached_property
    def runs(self) -> list[int]:
        """Lengths of the unbroken runs of placeholders."""
        return [len(places) for embed, places in self.stretches if embed]

    @cached_property
    def counts(self) -> list[int]:
        """Rows of the encoder's output in each segment, the pieces that have a budget each."""
        if self.per_run:
            return self.runs
        counts = frame_counts(sum(self.runs), self.frames if _by_frame(self.setting) else 1)
        assert counts is not None  # `make` refuses frames that do not split
        return counts

    def frame_sizes(self, behind: int | None) -> list[list[int] | None]:
        """Return how many tokens each frame of each segment has, None where that is not known. behind: tokens of a
        video that follow its last frame."""
        if behind is None or not compares_frames(self.setting.method):
            return [None] * len(self.counts)
        return [tokens_per_frame(count, self.frames, behind) for count in self.counts]

    @cached_property
    def keep(self) -> list[int]:
        if self.kept is not None:
            return [int(piece.sum()) for piece in self.mask.split(self.counts)]
        return [count_kept(self.setting, count) for count in self.counts]

    @cached_property
    def mask(self) -> Tensor:
        """`kept` as bool `[tokens]`."""
        return torch.tensor(self.kept, device="cpu")

    @cached_property
    def reduces(self) -> bool:
        return self.keep != self.counts

    @cached_property
    def span(self) -> tuple[int, int]:
        """The first placeholder and the end of the last."""
        places = [places for embed, places in self.stretches if embed]
        return places[0].start, places[-1].stop

    @cached_property
    def written(self) -> tuple[Tensor, Tensor]:
        """long `[rows]` each, of a plan that reduces: where each row stands in the text that is written, and where the
        token before the row's run of placeholders does; -1 is the one before the item."""
        runs, start = [(self.span[0], self.rows)], 0
        if self.per_run:
            runs, keep = [], iter(self.keep)
            for embed, places in self.stretches:
                number = next(keep) if embed else len(places)
                runs += [(start, number)] * embed
                start += number
        firsts, numbers = torch.tensor(runs, device="cpu").T
        before = (firsts - 1).repeat_interleave(numbers)
        ahead = (firsts - numbers.cumsum(0) + numbers).repeat_interleave(numbers)
        return torch.arange(self.rows, device="cpu") + ahead, before

    @cached_property
    def between(self) -> int:
        """Number of text tokens within the item (line breaks, time stamps) for which the model has to return a row.

        If all placeholders share a budget, only the features decide how many of them stay before and after such a
        token. So the whole span becomes placeholders, and the text's own embedding is one row among the others.
        """
        first, end = self.span
        return end - first - sum(self.runs) if self.reduces and not self.per_run else 0

    @cached_property
    def rows(self) -> int:
        """Number of rows that the model returns."""
        return sum(self.keep) + self.between

    def reduced(self) -> list[int]:
        """Return the ids to be written into the prompt; placeholders are those equal to `placeholder`."""
        tokens, (first, end) = self.tokens, self.span
        if not self.per_run:
            return [*tokens[:first], *[self.placeholder] * self.rows, *tokens[end:]]
        written, keep = list[int](), iter(self.keep)
        for embed, places in self.stretches:
            written += [self.placeholder] * next(keep) if embed else tokens[places.start : places.stop]
        return written

    @cached_property
    def placeholder(self) -> int:
        return next(token for token, embed, _ in self.text if embed)

    # -- on its way from process to process

    def encode(self) -> Tensor:
        """Return the plan as bytes in a tensor: only tensors travel with an item."""
        text = [[token, int(embed), number] for token, embed, number in self.text]
        content = {"setting": self.setting.to_json(), "tokens": text, "per_run": self.per_run, "frames": self.frames}
        if self.kept is not None:
            content["kept"] = [[int(stays), len(list(group))] for stays, group in itertools.groupby(self.kept)]
        if self.setting.bounds:
            content["bounds"] = self.setting.bounds
        return torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)

    @staticmethod
    def decode(data: Tensor) -> Plan:
        return _decode(data.cpu().numpy().tobytes())

    @staticmethod
    def from_item(item: Any, modality: str) -> Plan | None:
        """Return the plan that an item of vLLM carries, if any."""
        element = (item or {}).get(field_name(modality))
        return None if element is None or element.data is None else Plan.decode(element.data)

    @staticmethod
    def from_feature(feature: Any) -> Plan:
        """Return the plan of one of a prompt's items in vLLM's engine or worker, all of which carry one."""
        if (plan := Plan.from_item(feature.data, feature.modality)) is None:
            raise PlaceholderMismatchError(f"an item ({feature.modality}) came without a plan")
        return plan

    @staticmethod
    def build(setting: Setting, text: tuple[Run, ...], per_run: bool, frames: int = 1, behind: int = 0) -> Plan:
        """Make the plan of an item. frames: number of frames of a video; 1 for an image. behind: tokens that follow the
        last frame. Raises OptionError if the setting needs the frames' tokens and these cannot be determined."""
        whole = Plan(setting, text, per_run)
        if compares_frames(setting.method):
            return whole._compared(frames, behind)
        if (per_run and not acts_in_tower(setting.method)) or frames == 1 or not _by_frame(setting):
            return whole
        if len(whole.runs) == frames:  # time stamps between them, or names of tiles
            return dataclasses.replace(whole, per_run=True)
        if len(whole.runs) > 1 or frame_counts(sum(whole.runs), frames) is None:
            raise OptionError(
                'nothing tells which tokens of the video belong to which frame: use "per": "image", so that the whole '
                "video shares its budget"
            )
        return dataclasses.replace(whole, per_run=False, frames=frames)

    def _compared(self, frames: int, behind: int) -> Plan:
        count, method = sum(self.runs), get_method(self.setting)
        if tokens_per_frame(count, frames, behind) is None:
            raise OptionError(
                f"{method.name} compares the frames of a video, and the {count} tokens of this one do not "
                f"split into {frames} frames: let the processor sample no frames of its own, or use a method that "
                "compares none, such as divprune"
            )
        return dataclasses.replace(self, frames=frames)


def _by_frame(setting: Setting) -> bool:
    """Return True if every frame of a video has a budget of its own."""
    return not setting.keeps_all_tokens and (setting.per == "frame" or acts_in_tower(setting.method))


def _size(plan: Plan) -> int:
    """Return roughly the bytes of a decoded plan, with what it keeps of its runs and of each token."""
    return 1024 + 256 * len(plan.text) + 10 * plan.length


_decoded: LRUCache[Any, Plan] = LRUCache(64 * 2**20, _size)


# By bytes, since plans of long videos may be large; the lock is not held while one is decoded.
@cached(_decoded, lock=Lock())
def _decode(data: bytes) -> Plan:
    content = json.loads(data)
    text = tuple((token, bool(embed), number) for token, embed, number in content["tokens"])
    kept = content.get("kept")
    if kept is not None:
        kept = tuple(bool(stays) for stays, length in kept for _ in range(length))
    setting = parse_setting(content["setting"])
    if "bounds" in content:
        setting = dataclasses.replace(setting, bounds=tuple(content["bounds"]))
    return Plan(setting, text, content["per_run"], content["frames"], kept)
