"""Compiled directories as pages of HTML: charts and tables of what `report.json` and its neighbours say."""
