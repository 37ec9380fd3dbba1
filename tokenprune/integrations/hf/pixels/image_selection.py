# SPDX-License-Identifier: Apache-2.0
"""Select images of a prompt: the other images are removed from the processor's call, with their placeholders."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenprune.budgets import Budget
from tokenprune.errors import BudgetError
from tokenprune.integrations.hf.pixels.marker import MARK, refuse_second_patch
from tokenprune.integrations.hf.pixels.prompts import PromptReader, build_class, is_nested
from tokenprune.integrations.shared.attachable import Attachable
from tokenprune.integrations.shared.pixel_counts import PixelCounts
from tokenprune.models.processor_settings import SettingsReader
from tokenprune.models.token_counts import CountRule, find_rule
from tokenprune.selection.images import InputImage
from tokenprune.selection.sites.pixels import ImageChooser


class ViewPatch(Attachable):
    """Makes a processor drop images of a prompt, as if the prompt had been written without them.

    Args:
        method: Selects the images.
        budget: Maximum share or number of images.
        processor: A processor with a tokenizer.
        adapter: Adapter of the model, or None.

    Raises:
        OptionError: If the processor has no tokenizer.
        BudgetError: If the budget is not a share or number of images.
    """

    def __init__(self, method: ImageChooser, budget: Budget, processor: Any, adapter: Any = None) -> None:
        super().__init__()
        self.method, self.budget, self.processor, self.adapter = method, budget, processor, adapter
        if budget.keep is None or budget.per != "image":
            raise BudgetError(
                f"{method.name} does not support {budget}. Set keep to a share (a float) or a number of images."
            )
        self.reader = PromptReader(processor, method.name)
        self.rule, self.counts = find_rule(processor), PixelCounts()

    def _attach(self) -> None:
        refuse_second_patch(self.processor)
        self.swap_class(self.processor, build_class(self.processor, self._around, {MARK: self}))

    @contextmanager
    def _around(self, images: Any, text: Any) -> Iterator[tuple[Any, Any]]:
        yield self.change(images, text)

    def describe(self) -> str:
        return f"{self.method.name} ({self.budget})"

    def change(self, images: Any, text: Any) -> tuple[Any, Any]:
        """Return the images and texts of a processor's call without the dropped images."""
        prompts = self.reader.prompts(text)
        rows = self.reader.rows(images, prompts)
        kept = [
            self.method.choose(self.reader.question(prompt), len(row), self._get_limit(len(row))) if row else []
            for prompt, row in zip(prompts, rows, strict=True)
        ]
        kept_rows = [[row[index] for index in chosen] for row, chosen in zip(rows, kept, strict=True)]
        # An image given as an URL is not downloaded only for the statistics.
        if self.rule is not None and not any(isinstance(image, str) for row in rows for image in row):
            self.counts.record(self._count_tokens(self.rule, kept_rows), self._count_tokens(self.rule, rows))
        if all(len(chosen) == len(row) for chosen, row in zip(kept, rows, strict=True)):
            return images, text
        texts = [prompt.write(chosen) for prompt, chosen in zip(prompts, kept, strict=True)]
        return (
            kept_rows if is_nested(images) else [image for row in kept_rows for image in row],
            texts[0] if isinstance(text, str) else texts,
        )

    def _count_tokens(self, rule: CountRule, rows: list[list[Any]]) -> int:
        """Count the visual tokens of all images."""
        settings = SettingsReader(self.processor)
        return sum(rule.count(settings, *InputImage(image).size, len(row)) for row in rows for image in row)

    def _get_limit(self, count: int) -> int:
        keep = self.budget.keep
        if isinstance(keep, numbers.Integral):
            return min(int(keep), count)
        assert keep is not None  # see `__init__`
        return max(1, math.floor(count * keep + 1e-9))
