"""What several commands share: options, prepared networks, the search, reports."""
