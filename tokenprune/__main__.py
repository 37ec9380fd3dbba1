# SPDX-License-Identifier: Apache-2.0
"""Run the `tokenprune` command with `python -m tokenprune`, `accelerate launch -m` or `torchrun -m`."""

from tokenprune.cli import main

if __name__ == "__main__":
    main()
