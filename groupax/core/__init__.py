"""The foundation of all other rooms: settings, storage, records of rollouts, errors, text for terminals."""
