"""Results for people: tables on a terminal, charts, and an HTML report."""
