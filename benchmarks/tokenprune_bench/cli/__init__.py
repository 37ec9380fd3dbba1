# SPDX-License-Identifier: Apache-2.0
"""Commands of `tokenprune` that this package adds (entry points `tokenprune.commands`)."""
