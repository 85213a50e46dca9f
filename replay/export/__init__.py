"""Export of plans to the forms that other libraries load; each target has one file."""
