"""The engine as a server: `groupax serve`."""
