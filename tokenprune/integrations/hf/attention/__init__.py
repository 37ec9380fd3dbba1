# SPDX-License-Identifier: Apache-2.0
"""An add-on: change what a decoder's attention computes, in blocks, or over the tokens that a tower merged."""
