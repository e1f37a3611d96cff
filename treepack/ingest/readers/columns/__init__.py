"""Records of homemade layouts, by the columns that a user names or by usual names."""
