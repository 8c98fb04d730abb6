"""The part of `easydel.infra` that scripts import."""
