"""HTML pages of compiled directories: charts and tables of ``report.json``, ``timeline.json`` and others."""
