"""Training programs with the names and flags of EasyDeL's, one for each recipe."""
