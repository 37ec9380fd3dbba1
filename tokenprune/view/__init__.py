# SPDX-License-Identifier: Apache-2.0
"""The view of a method: visual tokens, where they lie, and what it may observe of them."""
