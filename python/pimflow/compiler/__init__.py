"""From a plan to something that runs, is checked and is stored."""
