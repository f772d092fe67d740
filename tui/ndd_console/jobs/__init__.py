"""What the screens show and do: runs and their folder, trials, tuning and the wizard."""
