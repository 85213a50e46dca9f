"""The distribution of calls over several devices, with one call at a time on each device."""
