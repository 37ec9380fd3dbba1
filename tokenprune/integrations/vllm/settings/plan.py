# SPDX-License-Identifier: Apache-2.0
"""`Plan`: the front end's decision for one image or video, which the model in the worker process carries out."""

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
from tokenprune.selection.frames import count_tokens_per_frame, split_into_frames
from tokenprune.selection.observable_registry import compares_frames
from tokenprune.settings import Setting

# Items of other modalities are not pruned.
MODALITIES = ("image", "video")


def field_name(modality: str) -> str:
    """Return the name of the field that carries an item's plan. A vLLM field belongs to one modality."""
    return f"{KEY}_{modality}"


# Equal consecutive tokens of an item's text: token id, whether it is a placeholder, and count. Long items have few
# runs, so the cost of a plan does not grow with the number of tokens.
Run = tuple[int, bool, int]


def find_runs(tokens: Sequence[int], embeds: Any = None) -> tuple[Run, ...]:
    """Return the runs of an item's text. `embeds` is True for placeholders, None if all tokens are."""
    runs, changes = list[Run](), list[int]()
    if embeds is not None:
        embeds = torch.as_tensor(embeds, device="cpu")
        changes = ((embeds[1:] != embeds[:-1]).nonzero().flatten() + 1).tolist()
    for start, end in itertools.pairwise([0, *changes, len(tokens)]):
        piece, embed = tokens[start:end], embeds is None or bool(embeds[start])
        if piece.count(piece[0]) == len(piece):
            runs.append((piece[0], embed, len(piece)))
        else:
            runs += [(token, embed, len(list(group))) for token, group in itertools.groupby(piece)]
    return tuple(runs)


@dataclass(frozen=True)
class Plan:
    """The text that vLLM would write for an item, and the setting that prunes it.

    Args:
        setting: Setting of the item.
        text: Text of the item in the prompt: placeholders and the tokens between them (see `Run`).
        per_run: Whether each run of placeholders has its own budget (see `Family`).
        frames: Number of frames of a video whose frames have their own budgets within one run, or are compared by the
            method. 1 otherwise. For methods inside the vision tower a tile is a frame.
        kept: For methods that select by pixels, True for each placeholder that is kept. None: the model selects.
    """

    setting: Setting
    text: tuple[Run, ...]
    per_run: bool
    frames: int = 1
    kept: tuple[bool, ...] | None = None

    @cached_property
    def length(self) -> int:
        """Number of tokens of the text."""
        return sum(count for *_, count in self.text)

    @property
    def tokens(self) -> list[int]:
        """Token ids of the text."""
        return [token for token, _, count in self.text for token in itertools.repeat(token, count)]

    @cached_property
    def is_embed(self) -> Tensor:
        """Bool (length,), True for placeholders."""
        embeds, counts = ([run[part] for run in self.text] for part in (1, 2))
        return torch.tensor(embeds, device="cpu").repeat_interleave(torch.tensor(counts, device="cpu"))

    @cached_property
    def places(self) -> Tensor:
        """Indices of the placeholders in the text, int64."""
        return self.is_embed.nonzero().flatten()

    @cached_property
    def stretches(self) -> list[tuple[bool, range]]:
        """Maximal runs of placeholders (True) and of other tokens (False), with their ranges in the text."""
        stretches, start = [], 0
        for embed, group in itertools.groupby(self.text, lambda run: run[1]):
            length = sum(count for *_, count in group)
            stretches.append((embed, range(start, start + length)))
            start += length
        return stretches

    @cached_property
    def is_plain(self) -> bool:
        """True if the text consists of placeholders only."""
        return all(embed for _, embed, _ in self.text)

    @cached_property
    def runs(self) -> list[int]:
        """Lengths of the runs of placeholders."""
        return [len(places) for embed, places in self.stretches if embed]

    @cached_property
    def counts(self) -> list[int]:
        """Number of encoder output rows of each segment. A segment has its own budget."""
        if self.per_run:
            return self.runs
        counts = split_into_frames(sum(self.runs), self.frames if _has_frame_budgets(self.setting) else 1)
        assert counts is not None  # `make` refuses frames that do not split
        return counts

    def frame_sizes(self, num_trailing: int | None) -> list[list[int] | None]:
        """Return the tokens of each frame of each segment, or None. `num_trailing` tokens follow the last frame."""
        if num_trailing is None or not compares_frames(self.setting.method):
            return [None] * len(self.counts)
        return [count_tokens_per_frame(count, self.frames, num_trailing) for count in self.counts]

    @cached_property
    def keep(self) -> list[int]:
        """Number of kept tokens of each segment."""
        if self.kept is not None:
            return [int(piece.sum()) for piece in self.mask.split(self.counts)]
        return [count_kept(self.setting, count) for count in self.counts]

    @cached_property
    def mask(self) -> Tensor:
        """`kept` as a bool tensor (tokens,)."""
        return torch.tensor(self.kept, device="cpu")

    @cached_property
    def reduces(self) -> bool:
        """True if tokens are dropped."""
        return self.keep != self.counts

    @cached_property
    def span(self) -> tuple[int, int]:
        """Index of the first placeholder, and the index after the last one."""
        places = [places for embed, places in self.stretches if embed]
        return places[0].start, places[-1].stop

    @cached_property
    def written(self) -> tuple[Tensor, Tensor]:
        """Indices in the written text of each row, and of the token before the row's run of placeholders.

        Both are int64 tensors (rows,), defined for plans that drop tokens. -1 is the token before the item.
        """
        runs, start = [(self.span[0], self.rows)], 0
        if self.per_run:
            runs, keep = [], iter(self.keep)
            for embed, places in self.stretches:
                length = next(keep) if embed else len(places)
                runs += [(start, length)] * embed
                start += length
        firsts, lengths = torch.tensor(runs, device="cpu").T
        before = (firsts - 1).repeat_interleave(lengths)
        ahead = (firsts - lengths.cumsum(0) + lengths).repeat_interleave(lengths)
        return torch.arange(self.rows, device="cpu") + ahead, before

    @cached_property
    def between(self) -> int:
        """Number of text tokens within the item (line breaks, time stamps) that are replaced by rows of the model.

        If all placeholders share a budget, only the features determine the kept tokens before and after such a token.
        The whole span then becomes placeholders, and the embeddings of the text are among the rows.
        """
        first, end = self.span
        return end - first - sum(self.runs) if self.reduces and not self.per_run else 0

    @cached_property
    def rows(self) -> int:
        """Number of rows that the model returns."""
        return sum(self.keep) + self.between

    def reduced(self) -> list[int]:
        """Return the token ids to write into the prompt."""
        tokens, (first, end) = self.tokens, self.span
        if not self.per_run:
            return [*tokens[:first], *[self.placeholder] * self.rows, *tokens[end:]]
        written, keep = list[int](), iter(self.keep)
        for embed, places in self.stretches:
            written += [self.placeholder] * next(keep) if embed else tokens[places.start : places.stop]
        return written

    @cached_property
    def placeholder(self) -> int:
        """Token id of the placeholders."""
        return next(token for token, embed, _ in self.text if embed)

    # -- transfer between processes

    def encode(self) -> Tensor:
        """Return the plan as a uint8 tensor of JSON, because vLLM sends only tensors with an item."""
        text = [[token, int(embed), count] for token, embed, count in self.text]
        content = {"setting": self.setting.to_json(), "tokens": text, "per_run": self.per_run, "frames": self.frames}
        if self.kept is not None:
            content["kept"] = [[int(keep), len(list(group))] for keep, group in itertools.groupby(self.kept)]
        if self.setting.bounds:
            content["bounds"] = self.setting.bounds
        return torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)

    @staticmethod
    def decode(data: Tensor) -> Plan:
        """Return the plan that `encode` wrote."""
        return _decode(data.cpu().numpy().tobytes())

    @staticmethod
    def from_item(item: Any, modality: str) -> Plan | None:
        """Return the plan in a `MultiModalKwargsItem`, or None if there is none."""
        element = (item or {}).get(field_name(modality))
        return None if element is None or element.data is None else Plan.decode(element.data)

    @staticmethod
    def from_feature(feature: Any) -> Plan:
        """Return the plan of a `MultiModalFeatureSpec` in the engine or a worker, where every item has one."""
        if (plan := Plan.from_item(feature.data, feature.modality)) is None:
            raise PlaceholderMismatchError(f"an item ({feature.modality}) has no plan")
        return plan

    @staticmethod
    def build(setting: Setting, text: tuple[Run, ...], per_run: bool, frames: int = 1, num_trailing: int = 0) -> Plan:
        """Build the plan of an item; raise OptionError if the tokens of each frame are needed and unknown.

        `frames` is 1 for an image. `num_trailing` tokens of a video follow its last frame.
        """
        plan = Plan(setting, text, per_run)
        if compares_frames(setting.method):
            return plan._build_frame_plan(frames, num_trailing)
        if (per_run and not acts_in_tower(setting.method)) or frames == 1 or not _has_frame_budgets(setting):
            return plan
        if len(plan.runs) == frames:  # separated by time stamps or names of tiles
            return dataclasses.replace(plan, per_run=True)
        if len(plan.runs) > 1 or split_into_frames(sum(plan.runs), frames) is None:
            raise OptionError(
                'The tokens of this video cannot be assigned to its frames. Use "per": "image", so that the whole '
                "video shares one budget"
            )
        return dataclasses.replace(plan, per_run=False, frames=frames)

    def _build_frame_plan(self, frames: int, num_trailing: int) -> Plan:
        count, method = sum(self.runs), get_method(self.setting)
        if count_tokens_per_frame(count, frames, num_trailing) is None:
            raise OptionError(
                f"{method.name} compares the frames of a video, and the {count} tokens of this one do not "
                f"split into {frames} frames. Pass sampled frames, or use a method that does not compare frames, such "
                "as divprune"
            )
        return dataclasses.replace(self, frames=frames)


def _has_frame_budgets(setting: Setting) -> bool:
    """Return True if every frame of a video has its own budget."""
    return not setting.keeps_all_tokens and (setting.per == "frame" or acts_in_tower(setting.method))


def _estimate_size(plan: Plan) -> int:
    """Return the approximate bytes of a decoded plan, including cached properties."""
    return 1024 + 256 * len(plan.text) + 10 * plan.length


_decoded: LRUCache[Any, Plan] = LRUCache(64 * 2**20, _estimate_size)


# Limited in bytes, because plans of long videos may be large. The lock is not held while a plan is decoded.
@cached(_decoded, lock=Lock())
def _decode(data: bytes) -> Plan:
    content = json.loads(data)
    text = tuple((token, bool(embed), count) for token, embed, count in content["tokens"])
    kept = content.get("kept")
    if kept is not None:
        kept = tuple(bool(keep) for keep, length in kept for _ in range(length))
    setting = parse_setting(content["setting"])
    if "bounds" in content:
        setting = dataclasses.replace(setting, bounds=tuple(content["bounds"]))
    return Plan(setting, text, content["per_run"], content["frames"], kept)
