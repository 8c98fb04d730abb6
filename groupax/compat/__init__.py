"""The interfaces of TRL, EasyDeL, transformers and PEFT, implemented with groupax."""
