"""The settings of a run: how they are declared, checked and parsed, and the records that its parts take."""
