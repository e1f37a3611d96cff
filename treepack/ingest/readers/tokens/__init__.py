"""Records of token ids: where prompt, response and padding are, and recorded experts."""
