# SPDX-License-Identifier: Apache-2.0
"""Assisted generation with a draft model that sees fewer visual tokens (docs/guides/drafts.md)."""
