"""What every other room stands on: settings, storage, records of rollouts, errors, text for terminals."""
