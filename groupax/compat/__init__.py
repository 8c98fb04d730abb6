"""Other libraries' names over groupax: `compat.trl`, `compat.easydel`, `compat.hf`. All aliases live here."""
