# SPDX-License-Identifier: Apache-2.0
"""Methods on pixels: fewer or smaller images in the calls of a processor."""
