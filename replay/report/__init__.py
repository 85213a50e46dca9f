"""Results for readers: tables on a terminal, charts, and an HTML report."""
