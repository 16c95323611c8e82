"""What happened: counters, the page /metrics, log lines, traces."""
