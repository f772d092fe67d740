"""Work that runs beside a screen: training, trials, tuning, the wizard, and where their figures come from."""
