# SPDX-License-Identifier: Apache-2.0
"""Commands that `tokenprune` has where this package is installed (entry points `tokenprune.commands`)."""
