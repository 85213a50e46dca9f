"""Charts for papers and READMEs, as Vega-Lite specifications and image files."""
