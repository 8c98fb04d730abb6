"""Programs with the flags of the scripts that users of EasyDeL know."""
