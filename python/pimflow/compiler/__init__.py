"""From a plan to an executable, which is verified and stored."""
