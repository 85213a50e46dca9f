"""Why a kernel is wrong on a recorded call: each cause is a hypothesis that experiments test."""
