"""Data: presets, tuned kernel tables, the demo model."""
