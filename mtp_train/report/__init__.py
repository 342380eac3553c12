"""Reports of runs and studies: ``report.json``, the HTML page, CSV tables, figures, and the summary for a terminal."""
