"""Recurrent layers and short convolutions on trees: gated delta rule, Mamba-2, KDA."""
