"""Rooms around the core, which never imports them: the page of runs, replays, plans, launchers, environments."""
