"""Models fitted to measurements, and compared with other simulators: what scripts run, and no command."""
