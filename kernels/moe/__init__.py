"""Casts and GEMMs of groups of adjacent rows, such as the tokens of each expert: all groups in one launch."""
