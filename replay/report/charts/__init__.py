"""Charts for papers and READMEs: specifications in Vega-Lite, and their files."""
