# SPDX-License-Identifier: Apache-2.0
"""Facts of a model's type in the table of families; an adapter of yours may say it as a class attribute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from tokenprune.integrations.shared.patch_grid import PatchSource


class FamilyFacts(PatchSource):
    """Facts of the model's row (`tokenprune.families.Family`), under the names that the engine reads."""

    @property
    def unmergeable(self) -> str | None:
        """Why the patches of this family cannot be merged in its tower; None if they can."""
        return None if self.row.merges else "it is not known what becomes of its patches"

    @property
    def decoder_names(self) -> tuple[str, ...]:
        """Paths at which the decoder may be in the module that merges images into text."""
        return self.row.decoder_names

    @property
    def norm_name(self) -> str:
        """Name of the decoder's last norm."""
        return self.row.norm_name

    @property
    def entry_tokens(self) -> Mapping[str, int]:
        """Arguments of the decoder that are gathered with the embeddings: name -> axis of the tokens."""
        return self.row.entry_tokens

    @property
    def layer_tokens(self) -> Mapping[str | int, int]:
        """Arguments of each layer with an entry for each token: name or position -> axis of the tokens."""
        return self.row.layer_tokens

    @property
    def resizing(self) -> Literal["input", "target"] | None:
        """The way in which methods on pixels make fewer tokens: see `Family.resizing`."""
        return self.row.resizing

    @property
    def features_per_image(self) -> bool:
        """True if a list of features from the encoder has one entry per image."""
        return self.row.features_per_image

    @property
    def step_within_image(self) -> int:
        """From one placeholder of an image to the next, at most, where no list of features separates images."""
        return self.row.step_within_image

    @property
    def tells_frames(self) -> bool:
        """True if it is known which tokens of a video make up each frame (`video_frames`, `behind_video`)."""
        return self.row.videos == "frames"

    @property
    def behind_video(self) -> int:
        """Tokens of a video that follow its last frame."""
        return self.row.after_video
