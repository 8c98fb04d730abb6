"""Training programs with the flags of EasyDeL's scripts."""
