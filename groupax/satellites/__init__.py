"""Rooms that stand around the core and that it never imports: the page of runs, replays, plans, launchers, environments."""
