# SPDX-License-Identifier: Apache-2.0
"""Methods that choose between the images of a prompt: the others leave the processor's call, with their
placeholders."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenprune.budgets import Budget
from tokenprune.errors import BudgetError
from tokenprune.integrations.hf.pixels.marker import MARK, refuse_second_patch
from tokenprune.integrations.hf.pixels.prompts import PromptReader, intercepted, is_nested
from tokenprune.integrations.shared.attachable import Attachable
from tokenprune.integrations.shared.pixel_counts import PixelCounts
from tokenprune.models.token_counts import CountRule, SettingsReader, find_rule
from tokenprune.selection.images import InputImage
from tokenprune.selection.sites.pixels import ImageChooser


class ViewPatch(Attachable):
    """Makes a processor leave out images of a prompt before anything is made of them: no pixels, no placeholders, and
    positions as if they had never been there.

    Raises OptionError for anything but a whole processor, BudgetError for a budget that is no number of images.
    """

    def __init__(self, method: ImageChooser, budget: Budget, processor: Any, adapter: Any = None) -> None:
        super().__init__()
        self.method, self.budget, self.processor, self.adapter = method, budget, processor, adapter
        if budget.keep is None or budget.per != "image":
            raise BudgetError(f"{method.name} takes keep as a share (a float) or a number of images, not {budget}")
        self.reader = PromptReader(processor, method.name)
        self.rule, self.counts = find_rule(processor), PixelCounts()

    def _attach(self) -> None:
        refuse_second_patch(self.processor)
        self.swap_class(self.processor, intercepted(self.processor, self._around, {MARK: self}))

    @contextmanager
    def _around(self, images: Any, text: Any) -> Iterator[tuple[Any, Any]]:
        yield self.change(images, text)

    def describe(self) -> str:
        return f"{self.method.name} ({self.budget})"

    def change(self, images: Any, text: Any) -> tuple[Any, Any]:
        """Return the images and texts of a processor's call without those that are left out."""
        prompts = self.reader.prompts(text)
        rows = self.reader.rows(images, prompts)
        kept = [
            self.method.choose(self.reader.question(prompt), len(row), self._most(len(row))) if row else []
            for prompt, row in zip(prompts, rows, strict=True)
        ]
        left = [[row[number] for number in chosen] for row, chosen in zip(rows, kept, strict=True)]
        # An image that is still an address is not fetched only to be counted.
        if self.rule is not None and not any(isinstance(image, str) for row in rows for image in row):
            self.counts.record(self._tokens(self.rule, left), self._tokens(self.rule, rows))
        if all(len(chosen) == len(row) for chosen, row in zip(kept, rows, strict=True)):
            return images, text
        written = [prompt.keeping(chosen) for prompt, chosen in zip(prompts, kept, strict=True)]
        return (
            left if is_nested(images) else [image for row in left for image in row],
            written[0] if isinstance(text, str) else written,
        )

    def _tokens(self, rule: CountRule, rows: list[list[Any]]) -> int:
        """Return how many visual tokens the processor makes of the images of each prompt, all together."""
        read = SettingsReader(self.processor)
        return sum(rule.count(read, *InputImage(image).size, len(row)) for row in rows for image in row)

    def _most(self, count: int) -> int:
        keep = self.budget.keep
        if isinstance(keep, numbers.Integral):
            return min(int(keep), count)
        assert keep is not None  # see `__init__`
        return max(1, math.floor(count * keep + 1e-9))
