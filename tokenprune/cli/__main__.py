# SPDX-License-Identifier: Apache-2.0
"""`python -m tokenprune.cli` is the `tokenprune` command."""

from tokenprune.cli import main

main()
