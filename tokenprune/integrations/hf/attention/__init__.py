# SPDX-License-Identifier: Apache-2.0
"""Parts that change the decoder's attention: block attention, virtual unmerging, and weights for merged tokens."""
