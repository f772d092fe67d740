"""Work behind the screens: training, trials, tuning, the wizard, and the data that the screens show."""
